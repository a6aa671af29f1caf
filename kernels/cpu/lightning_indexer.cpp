// The lightning indexer: kernels/indexer/lightning_indexer.py, whose references define it.
//
// A tile is some queries of one segment. Keys are taken a panel at a time, transposed, so that lanes are keys; the
// products of a few heads stay in registers until they are weighed and summed, and a score is compared with the worst of
// its query's best so far when it is made. So neither products nor scores are ever written, and memory does not grow
// with the context. For few queries (decode) transposing the keys would cost more than the products: there the queries
// are transposed, and lanes are heads.

#include <climits>

#include "replay.h"
#include "tiles.h"

namespace {

constexpr int HEADS_AT_ONCE = 4;
constexpr int PANEL_VECTORS = MANY_REGISTERS ? 6 : 2;
constexpr int PANEL = PANEL_VECTORS * LANES;  // keys
constexpr int MOST_QUERIES = 128;  // of a tile
constexpr int FEW_QUERIES = 4;
constexpr int ROWS_AT_ONCE = 8;  // keys, for few queries
constexpr int ROWS = 16;  // keys whose scores are compared together, for few queries; LANES divides it
constexpr int MARGIN = (PANEL > ROWS ? PANEL : ROWS) + LANES;  // of entries that may be added before the best are kept

struct Problem {
    Numbers q;  // [rows, heads, dim]
    const float* weights;  // [rows, heads]
    Numbers pool;
    const int32_t *tables, *visible;
    int64_t page_stride, table_stride, page_size, heads, dim, k;
    bool one_form;  // few queries take panels too: the two forms add in different orders
    int32_t* slots;  // [rows, k]
    int64_t* keys;  // [rows, k] candidate keys, by page_index, which is shaped as the tables; or null
    const int32_t* page_index;
};

struct Tile {
    int64_t row, count, sequence, end;  // keys that the query with most sees; those of padding see none
};

// A score as an integer of the same order: NaN above everything, -0 as +0.
inline Ints order_of(Floats score) {
    score += 0.0f;
    Ints bits;
    std::memcpy(&bits, &score, sizeof bits);
    bits ^= (bits >> 31) & INT_MAX;
    return (score == score) ? bits : Ints{} + INT_MAX;
}

constexpr int32_t ORDER_OF_NAN = 0x7f800001;  // in candidate keys
constexpr int32_t ORDER_OF_MINUS_INFINITY = (int32_t)0xff800000u ^ INT_MAX;  // is never selected

#if defined(__AVX512F__)
constexpr int32_t COUNTING[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

// The best of one query's scores so far, by position: two arrays of `capacity` entries.
struct Best {
    int32_t *orders, *positions;
    int64_t count, capacity;
    int32_t worst;  // only what is above it counts

    // Adds those of the scores at `position` ... that count, of which `lanes` exist.
    void add(Ints order, int32_t position, int64_t lanes) {
#if defined(__AVX512F__)
        __mmask16 above = _mm512_cmpgt_epi32_mask((__m512i)order, _mm512_set1_epi32(worst));
        if (lanes < LANES) above &= (1u << lanes) - 1;
        if (!above) return;
        const __m512i places = _mm512_add_epi32(_mm512_set1_epi32(position), _mm512_loadu_si512(COUNTING));
        _mm512_storeu_si512(orders + count, _mm512_maskz_compress_epi32(above, (__m512i)order));
        _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(above, places));
        count += __builtin_popcount(above);
#else
        const Ints above = order > worst;
        int32_t any = 0;
        for (int lane = 0; lane < LANES; lane++) any |= above[lane];
        if (!any) return;
        for (int lane = 0; lane < LANES; lane++) {
            orders[count] = order[lane];
            positions[count] = position + lane;
            count += (above[lane] != 0) & (lane < lanes);
        }
#endif
    }

    void keep_if_full(int64_t k) {
        if (count > capacity - MARGIN) keep(k);
    }

    int64_t count_from(int32_t bound) const {
        int32_t found = 0;
        for (int64_t i = 0; i < count; i++) found += orders[i] >= bound;
        return found;
    }

    // Leaves k entries: the highest, and of equal ones those of the lowest positions.
    void keep(int64_t k) {
        if (count <= k) return;
        // The greatest bound that at least k reach.
        int32_t least = INT_MAX, most = INT_MIN;
        for (int64_t i = 0; i < count; i++) {
            least = orders[i] < least ? orders[i] : least;
            most = orders[i] > most ? orders[i] : most;
        }
        int64_t low = least, high = most;
        int64_t reach = count;
        while (low < high && reach != k) {
            int64_t middle = low + (high - low + 1) / 2;
            int64_t found = count_from((int32_t)middle);
            if (found >= k) {
                low = middle;
                reach = found;
            } else {
                high = middle - 1;
            }
        }
        const int32_t bound = (int32_t)low;
        // Where more reach it than are wanted, these equal it, and the last of them are left out.
        int64_t surplus = reach - k, equal = 0;
        if (surplus > 0) {
            for (int64_t i = 0; i < count; i++) equal += orders[i] == bound;
        }
        int64_t allowed = surplus > 0 ? equal - surplus : INT_MAX, kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const int32_t order = orders[i], position = positions[i];
            const bool tie = order == bound;
            orders[kept] = order;
            positions[kept] = position;
            kept += (order > bound) | (tie & (allowed > 0));
            allowed -= tie;
        }
        count = kept;
        worst = bound;
    }
};

// The key as floats, which may be in `into`.
inline const float* key_of(const Problem& p, const int32_t* table, int64_t position, float* into) {
    return p.pool.read(table[position / p.page_size] * p.page_stride + position % p.page_size * p.dim, p.dim, into);
}

inline int32_t slot_of(const Problem& p, const int32_t* table, int32_t position) {
    return (int32_t)(table[position / p.page_size] * p.page_size + position % p.page_size);
}

// kernels/indexer/_candidates.py
inline int64_t candidate_key(const Problem& p, const int32_t* index, int32_t order, int32_t position) {
    const int64_t at = index[position / p.page_size] * p.page_size + position % p.page_size;
    return (int64_t)((uint64_t)(order < ORDER_OF_NAN ? order : ORDER_OF_NAN) << 32 | (0xffffffffu - (uint64_t)at));
}

// panel[d][lane] of the keys first ... first + PANEL - 1, of which `count` exist; after it there is room for one key each.
void pack(const Problem& p, const int32_t* table, int64_t first, int64_t count, float* panel) {
    const float* rows[PANEL];
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t position = first + (i < count ? i : count - 1);
        rows[i] = key_of(p, table, position, panel + p.dim * (PANEL + i));
    }
    for (int64_t d = 0; d < p.dim; d++) {
        for (int i = 0; i < PANEL; i++) panel[d * PANEL + i] = rows[i][d];
    }
}

// sums += sum over H heads of weight * relu(q * key), for the keys of a panel.
template <int H>
inline void add_heads(const float* q, const float* weights, int64_t dim, const float* panel, Floats* sums) {
    Floats products[H][PANEL_VECTORS] = {};
    for (int64_t d = 0; d < dim; d++) {
        const float* line = panel + d * PANEL;
        Floats keys[PANEL_VECTORS];
        for (int n = 0; n < PANEL_VECTORS; n++) keys[n] = load(line + n * LANES);
        for (int h = 0; h < H; h++) {
            const Floats query = q[h * dim + d] - Floats{};
            for (int n = 0; n < PANEL_VECTORS; n++) products[h][n] += query * keys[n];
        }
    }
    for (int h = 0; h < H; h++) {
        for (int n = 0; n < PANEL_VECTORS; n++) {
            const Floats product = products[h][n];
            sums[n] += weights[h] * (product < 0.0f ? Floats{} : product);  // NaN stays NaN
        }
    }
}

void score(const Problem& p, const float* q, int64_t row, const float* panel, Floats* sums) {
    const float* weights = p.weights + row * p.heads;
    for (int n = 0; n < PANEL_VECTORS; n++) sums[n] = Floats{};
    int64_t h = 0;
    for (; h + HEADS_AT_ONCE <= p.heads; h += HEADS_AT_ONCE)
        add_heads<HEADS_AT_ONCE>(q + h * p.dim, weights + h, p.dim, panel, sums);
    for (; h < p.heads; h++) add_heads<1>(q + h * p.dim, weights + h, p.dim, panel, sums);
}

int64_t capacity_for(int64_t k) { return 2 * k + MARGIN; }

void select_by_panels(const Problem& p, const Tile& tile, Best* best, float* panel) {
    const int32_t* table = p.tables + tile.sequence * p.table_stride;
    const int64_t end = tile.end, size = p.heads * p.dim;
    const float* q = p.q.read(tile.row * size, tile.count * size, panel + 2 * PANEL * p.dim);
    for (int64_t first = 0; first < end; first += PANEL) {
        pack(p, table, first, end - first < PANEL ? end - first : PANEL, panel);
        for (int64_t i = 0; i < tile.count; i++) {
            const int64_t seen = p.visible[tile.row + i] - first;  // keys of the panel
            if (seen <= 0) continue;
            Floats sums[PANEL_VECTORS];
            score(p, q + i * size, tile.row + i, panel, sums);
            for (int n = 0; n < PANEL_VECTORS && n * LANES < seen; n++)
                best[i].add(order_of(sums[n]), (int32_t)(first + n * LANES), seen - n * LANES);
            best[i].keep_if_full(p.k);
        }
    }
}

// Adds to scores[row] what LANES heads of a query make of ROWS keys; queries [dim][LANES].
void score_rows(const float* const* rows, int64_t dim, const float* queries, Floats weights, float* scores) {
    for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
        const float* const* some = rows + first;
        Floats products[ROWS_AT_ONCE] = {};
        for (int64_t d = 0; d < dim; d++) {
            const Floats query = load(queries + d * LANES);
            for (int r = 0; r < ROWS_AT_ONCE; r++) products[r] += some[r][d] * query;
        }
        for (int r = 0; r < ROWS_AT_ONCE; r++) {
            const Floats product = products[r];
            scores[first + r] += sum_of(weights * (product < 0.0f ? Floats{} : product));
        }
    }
}

void select_by_rows(const Problem& p, const Tile& tile, Best* best, float* scratch) {
    const int32_t* table = p.tables + tile.sequence * p.table_stride;
    const int64_t padded = round_up(p.heads, LANES);
    float *queries = scratch, *weights = scratch + padded * p.dim, *keys = weights + padded;
    for (int64_t i = 0; i < tile.count; i++) {
        const int64_t row = tile.row + i, end = p.visible[row];
        for (int64_t h = 0; h < padded; h++) {
            float* lane = queries + h / LANES * p.dim * LANES + h % LANES;
            const float* query = h < p.heads ? p.q.read((row * p.heads + h) * p.dim, p.dim, keys) : nullptr;
            for (int64_t d = 0; d < p.dim; d++) lane[d * LANES] = h < p.heads ? query[d] : 0.0f;
            weights[h] = h < p.heads ? p.weights[row * p.heads + h] : 0.0f;
        }
        for (int64_t first = 0; first < end; first += ROWS) {
            const float* rows[ROWS];
            for (int64_t r = 0; r < ROWS; r++)
                rows[r] = key_of(p, table, first + r < end ? first + r : end - 1, keys + r * p.dim);
            float scores[ROWS] = {};
            for (int64_t h = 0; h < padded; h += LANES)
                score_rows(rows, p.dim, queries + h * p.dim, load(weights + h), scores);
            for (int n = 0; n < ROWS && first + n < end; n += LANES)
                best[i].add(order_of(load(scores + n)), (int32_t)(first + n), end - first - n);
            best[i].keep_if_full(p.k);
        }
    }
}

void select(const Problem& p, const Tile& tile, float* scratch) {
    const int32_t* table = p.tables + tile.sequence * p.table_stride;
    const int64_t capacity = capacity_for(p.k);
    int32_t* entries = reinterpret_cast<int32_t*>(scratch);
    float* rest = scratch + tile.count * 2 * capacity;
    Best best[MOST_QUERIES];
    for (int64_t i = 0; i < tile.count; i++)
        best[i] = {entries + 2 * i * capacity, entries + (2 * i + 1) * capacity, 0, capacity, ORDER_OF_MINUS_INFINITY};
    if (tile.count <= FEW_QUERIES && !p.one_form)
        select_by_rows(p, tile, best, rest);
    else
        select_by_panels(p, tile, best, rest);
    for (int64_t i = 0; i < tile.count; i++) {
        best[i].keep(p.k);
        int32_t* out = p.slots + (tile.row + i) * p.k;
        for (int64_t j = 0; j < p.k; j++) out[j] = j < best[i].count ? slot_of(p, table, best[i].positions[j]) : -1;
        if (!p.keys) continue;
        const int32_t* index = p.page_index + tile.sequence * p.table_stride;
        int64_t* keys = p.keys + (tile.row + i) * p.k;
        for (int64_t j = 0; j < p.k; j++)
            keys[j] = j < best[i].count ? candidate_key(p, index, best[i].orders[j], best[i].positions[j]) : INT64_MIN;
    }
}

}  // namespace

// Floats of scratch that a thread needs for tiles of so many queries.
extern "C" int64_t dsa_lightning_indexer_scratch(
    int64_t queries, int64_t heads, int64_t dim, int64_t k, int64_t type) {
    const int64_t transposed = round_up(heads, LANES) * (dim + 1) + dim * ROWS;
    const int64_t panels = 2 * dim * PANEL + (type ? queries * heads * dim : 0);
    return queries * 2 * capacity_for(k) + (panels > transposed ? panels : transposed);
}

// tiles: [tile_count, 2] first row and rows, `largest` at most; sequences, visible: of each row (kernels/rows/segment.py).
// Returns 1, and does nothing, where a visible token's page lies outside of the pool; else 0.
extern "C" int64_t dsa_lightning_indexer(
    const void* q, const float* weights, const void* pool, const int32_t* tables, const int32_t* tiles,
    const int32_t* sequences, const int32_t* visible, int32_t* slots, int64_t* keys, const int32_t* page_index,
    float* scratch, int64_t type,
    int64_t tile_count, int64_t largest, int64_t pages, int64_t page_stride, int64_t table_stride, int64_t page_size, int64_t heads,
    int64_t dim, int64_t k, int64_t one_form, int64_t threads) {
    const auto tile_at = [=](int64_t i) {
        const int32_t* given = tiles + 2 * i;
        Tile tile{given[0], given[1], sequences[given[0]], 0};
        for (int64_t row = tile.row; row < tile.row + tile.count; row++)
            tile.end = visible[row] > tile.end ? visible[row] : tile.end;
        return tile;
    };
    for (int64_t i = 0; i < tile_count; i++) {
        const Tile tile = tile_at(i);
        const int32_t* table = tables + tile.sequence * table_stride;
        for (int64_t n = 0; n * page_size < tile.end; n++) {
            if (table[n] < 0 || table[n] >= pages) return 1;
        }
    }
    const Problem p{{q, type},   weights,   {pool, type}, tables, visible, page_stride,
                    table_stride, page_size, heads, dim, k, one_form != 0, slots, keys, page_index};
    const int64_t size = dsa_lightning_indexer_scratch(largest, heads, dim, k, type);
    // Last tiles first: in a causal batch they tend to see more tokens.
    for_tiles(tile_count, (int)threads, scratch, size,
              [&](int64_t i, float* mine) { select(p, tile_at(tile_count - 1 - i), mine); });
    return 0;
}
REPLAYED(dsa_lightning_indexer)
