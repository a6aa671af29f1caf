// Sparse attention: kernels/attention/sparse_attention.py, whose reference defines it.
//
// A tile is one token. Its rows are gathered once, as floats. For the scores lanes are heads, so that the softmax is lane by lane;
// for the values lanes are columns of the rows.

#include <cmath>

#include "replay.h"
#include "tiles.h"

namespace {

constexpr int ROWS_AT_ONCE = 8;
constexpr int HEADS_AT_ONCE = 4;
constexpr int FEW_HEADS = LANES > 4 ? LANES / 2 : LANES;  // fill half a vector; two halves take no longer than a whole
constexpr int COLUMN_VECTORS = MANY_REGISTERS ? 4 : 2;

struct Problem {
    Numbers q;  // [tokens, heads, width]
    Numbers pool;  // [rows, width]
    const int32_t* slots;  // [tokens, k]
    const int32_t* counts;  // [tokens], or none
    Numbers out;  // [tokens, heads, value_dim]
    float* lse;  // [tokens, heads]
    int64_t pool_rows, row_stride, heads, width, value_dim, k;
    float scale;
    std::atomic<bool>* outside;  // whether a slot is not below pool_rows; it is skipped
};

// p[row][lane] of `count` rows, a multiple of ROWS_AT_ONCE: the product with head `lane` of queries [width][L].
template <int L>
void score(const float* rows, int64_t count, int64_t stride, int64_t width, const float* queries, float* p) {
    typedef typename Vectors<L>::Float V;
    for (int64_t row = 0; row < count; row += ROWS_AT_ONCE) {
        const float* some = rows + row * stride;
        V sums[ROWS_AT_ONCE] = {};
        for (int64_t d = 0; d < width; d++) {
            const V query = load<V>(queries + d * L);
            for (int r = 0; r < ROWS_AT_ONCE; r++) sums[r] += some[r * stride + d] * query;
        }
        for (int r = 0; r < ROWS_AT_ONCE; r++) store(p + (row + r) * L, sums[r]);
    }
}

// out[head][column] of H heads and N vectors of columns; `share` is 1 / total of each head.
template <int H, int N>
void weigh(const float* rows, int64_t count, int64_t stride, const float* p, int64_t lanes, const float* share,
           int64_t columns, const Numbers& out, int64_t at, int64_t out_stride) {
    Floats sums[H][N] = {};
    for (int64_t row = 0; row < count; row++) {
        Floats values[N];
        for (int n = 0; n < N; n++) values[n] = load(rows + row * stride + n * LANES);
        for (int h = 0; h < H; h++) {
            const Floats weight = p[row * lanes + h] - Floats{};
            for (int n = 0; n < N; n++) sums[h][n] += weight * values[n];
        }
    }
    for (int h = 0; h < H; h++) {
        float line[N * LANES];
        for (int n = 0; n < N; n++) store(line + n * LANES, sums[h][n] * share[h]);
        out.write(at + h * out_stride, line, columns < N * LANES ? columns : N * LANES);
    }
}

template <int H>
void weigh_columns(const float* rows, int64_t count, int64_t stride, const float* p, int64_t lanes, const float* share,
                   int64_t columns, const Numbers& out, int64_t at) {
    int64_t c = 0;
    for (; c + COLUMN_VECTORS * LANES <= columns; c += COLUMN_VECTORS * LANES)
        weigh<H, COLUMN_VECTORS>(rows + c, count, stride, p, lanes, share, columns - c, out, at + c, columns);
    for (; c < columns; c += LANES)
        weigh<H, 1>(rows + c, count, stride, p, lanes, share, columns - c, out, at + c, columns);
}

int64_t stride_of(int64_t width, int64_t value_dim) {
    const int64_t values = round_up(value_dim, LANES);
    return values > width ? values : width;
}

// The gathered rows of the token, one after the other; returns how many.
int64_t gather(const Problem& p, int64_t token, int64_t stride, float* rows) {
    const int32_t* slots = p.slots + token * p.k;
    const char* pool = static_cast<const char*>(p.pool.at);
    const int64_t bytes = bytes_of(p.pool.type) * p.row_stride;
    const int64_t most = p.counts && p.counts[token] < p.k ? p.counts[token] : p.k;
    int64_t count = 0;
    for (int64_t i = 0; i < most; i++) {
        if (i + 8 < most && slots[i + 8] >= 0) __builtin_prefetch(pool + slots[i + 8] * bytes);
        if (slots[i] >= p.pool_rows)
            *p.outside = true;
        else if (slots[i] >= 0)
            p.pool.copy(slots[i] * p.row_stride, p.width, rows + count++ * stride);
    }
    return count;
}

// Heads `first` ... of a token, as many as there are lanes.
template <int L>
void attend(const Problem& p, int64_t token, int64_t first, const float* rows, int64_t count, int64_t stride,
            float* weights, float* queries) {
    typedef typename Vectors<L>::Float V;
    const int64_t heads = p.heads - first < L ? p.heads - first : L;
    for (int64_t h = 0; h < L; h++) {
        const float* q = h < heads ? p.q.read((token * p.heads + first + h) * p.width, p.width, queries + p.width * L) : nullptr;
        for (int64_t d = 0; d < p.width; d++) queries[d * L + h] = q ? q[d] * p.scale : 0.0f;
    }
    score<L>(rows, round_up(count, ROWS_AT_ONCE), stride, p.width, queries, weights);
    V top = load<V>(weights), total = V{};
    for (int64_t row = 1; row < count; row++) {
        const V next = load<V>(weights + row * L);
        top = top > next ? top : next;
    }
    for (int64_t row = 0; row < count; row++) {
        const V weight = exp_of<L>(load<V>(weights + row * L) - top);
        store(weights + row * L, weight);
        total += weight;
    }
    float share[L];
    for (int64_t h = 0; h < L; h++) share[h] = 1.0f / total[h];
    const int64_t out = (token * p.heads + first) * p.value_dim;
    for (int64_t h = 0; h < heads; h++) p.lse[token * p.heads + first + h] = top[h] + std::log(total[h]);
    int64_t h = 0;
    for (; h + HEADS_AT_ONCE <= heads; h += HEADS_AT_ONCE)
        weigh_columns<HEADS_AT_ONCE>(rows, count, stride, weights + h, L, share + h, p.value_dim, p.out, out + h * p.value_dim);
    for (; h < heads; h++) weigh_columns<1>(rows, count, stride, weights + h, L, share + h, p.value_dim, p.out, out + h * p.value_dim);
}

void attend_token(const Problem& p, int64_t token, float* scratch) {
    const int64_t stride = stride_of(p.width, p.value_dim);
    float* rows = scratch;
    float* weights = rows + (p.k + ROWS_AT_ONCE) * stride;
    float* queries = weights + (p.k + ROWS_AT_ONCE) * LANES;
    const int64_t count = gather(p, token, stride, rows);
    if (count == 0) {
        const int64_t bytes = p.heads * p.value_dim * bytes_of(p.out.type);
        std::memset(static_cast<char*>(const_cast<void*>(p.out.at)) + token * bytes, 0, bytes);
        for (int64_t h = 0; h < p.heads; h++) p.lse[token * p.heads + h] = -INFINITY;
        return;
    }
    if (p.heads <= FEW_HEADS) {
        attend<FEW_HEADS>(p, token, 0, rows, count, stride, weights, queries);
        return;
    }
    for (int64_t first = 0; first < p.heads; first += LANES)
        attend<LANES>(p, token, first, rows, count, stride, weights, queries);
}

}  // namespace

// Floats of scratch that a thread needs.
extern "C" int64_t dsa_sparse_attention_scratch(int64_t width, int64_t value_dim, int64_t k) {
    return (k + ROWS_AT_ONCE) * (stride_of(width, value_dim) + LANES) + width * (LANES + 1);
}

// Returns 1 where a slot lies outside of the pool, else 0.
extern "C" int64_t dsa_sparse_attention(
    const void* q, const void* pool, const int32_t* slots, const int32_t* counts, void* out, float* lse,
    float* scratch, int64_t type, int64_t tokens, int64_t pool_rows, int64_t row_stride, int64_t heads, int64_t width,
    int64_t value_dim, int64_t k, float scale, int64_t threads) {
    std::atomic<bool> outside{false};
    const Problem p{{q, type}, {pool, type}, slots, counts, {out, type}, lse,
                    pool_rows, row_stride, heads, width, value_dim, k, scale, &outside};
    const int64_t size = dsa_sparse_attention_scratch(width, value_dim, k);
    for_tiles(tokens, (int)threads, scratch, size,
              [&](int64_t token, float* mine) { attend_token(p, token, mine); });
    return outside;
}
REPLAYED(dsa_sparse_attention)
