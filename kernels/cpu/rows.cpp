// What is done to the rows of a step: kernels/rows/rms_norm.py, rope.py, silu_mul.py, store_latent.py,
// store_index_keys.py and paged.py, whose references define it.
//
// A tile is some rows. Each is read once, and written once to where it is to go.

#include <cmath>

#include "products.h"
#include "replay.h"

namespace {

// Calls work(i, count) for every vector of a row, of which `count` lanes exist.
template <class Work>
inline void for_vectors(int64_t width, const Work& work) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) work(i, LANES);
    if (i < width) work(i, width - i);
}

// Calls work(row, T{}) for every row of a step, whose numbers are of the type T.
template <class Work>
void for_typed_rows(int64_t type, int64_t rows, int64_t threads, const Work& work) {
    of_type(type, [&](auto zero) {
        for_rows(rows, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
            for (int64_t row = first; row < end; row++) work(row, zero);
        });
    });
}

// out = weight * x / sqrt(mean(x^2) + eps), rounded before the weight as well
template <class T>
void rms_norm_row(const T* x, const T* weight, int64_t width, float eps, T* out) {
    Floats squares{};
    for_vectors(width, [&](int64_t i, int64_t count) {
        const Floats values = load_some(x + i, count);
        squares += values * values;
    });
    const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
    for_vectors(width, [&](int64_t i, int64_t count) {
        store_some(out + i, load_some(weight + i, count) * rounded<T>(load_some(x + i, count) * scale), count);
    });
}

// out = weight * (x - mean) / sqrt(variance + eps) + bias
template <class T>
void layer_norm_row(const T* x, const float* weight, const float* bias, int64_t width, float eps, T* out) {
    Floats sums{}, squares{};
    for_vectors(width, [&](int64_t i, int64_t count) { sums += load_some(x + i, count); });
    const float mean = sum_of(sums) / width;
    for_vectors(width, [&](int64_t i, int64_t count) {
        Floats values = load_some(x + i, count) - mean;
        for (int64_t lane = count; lane < LANES; lane++) values[lane] = 0.0f;
        squares += values * values;
    });
    const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
    for_vectors(width, [&](int64_t i, int64_t count) {
        const Floats normed = (load_some(x + i, count) - mean) * scale;
        store_some(out + i, normed * load_some(weight + i, count) + load_some(bias + i, count), count);
    });
}

// The first 2 * half numbers of a row, in pairs; out may be x.
template <class T>
void turn_row(const T* x, const float* cos, const float* sin, int64_t half, bool interleaved, T* out) {
    for_vectors(half, [&](int64_t i, int64_t count) {
        Floats a, b;
        if (interleaved) {
            T first[LANES] = {}, second[LANES] = {};
            for (int64_t j = 0; j < count; j++) first[j] = x[2 * (i + j)], second[j] = x[2 * (i + j) + 1];
            a = load(first), b = load(second);
        } else {
            a = load_some(x + i, count), b = load_some(x + half + i, count);
        }
        const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
        const Floats turned_a = a * c - b * s, turned_b = b * c + a * s;
        if (interleaved) {
            T first[LANES], second[LANES];
            store(first, turned_a), store(second, turned_b);
            for (int64_t j = 0; j < count; j++) out[2 * (i + j)] = first[j], out[2 * (i + j) + 1] = second[j];
        } else {
            store_some(out + i, turned_a, count), store_some(out + half + i, turned_b, count);
        }
    });
}

// Angles of the tokens' rows.
struct Angles {
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, half;
    bool interleaved;

    template <class T>
    void turn(int64_t token, const T* x, T* out) const {
        turn_row(x, cos + token * cos_stride, sin + token * sin_stride, half, interleaved, out);
    }
};

// Where rows go: to slots of a pool, or without slots row by row.
struct Pool {
    void* values;
    const void* slots;  // int32, or int64 where `wide`
    int64_t wide, pages, page_size, page_stride, width;

    int64_t slot(int64_t row) const {
        if (!slots) return row;
        return wide ? static_cast<const int64_t*>(slots)[row] : static_cast<const int32_t*>(slots)[row];
    }

    bool holds(int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            if (slot(row) >= pages * page_size) return false;
        }
        return true;
    }

    // None for a row that goes nowhere.
    template <class T>
    T* place(int64_t row) const {
        const int64_t at = slot(row);
        return at < 0 ? nullptr : static_cast<T*>(values) + at / page_size * page_stride + at % page_size * width;
    }
};

}  // namespace

// x [rows, width] with any row stride; with a residual [rows, width], their sum is written and normed, and `also`, if
// there is one, is added to x first.
extern "C" void dsa_rms_norm(
    const void* x, const void* also, const void* residual, const void* weight, void* normed, void* summed, int64_t type,
    int64_t rows, int64_t width, int64_t x_stride, float eps, int64_t threads) {
    for_typed_rows(type, rows, threads, [&](int64_t row, auto zero) {
        typedef decltype(zero) T;
        const T* from = (const T*)x + row * x_stride;
        if (residual) {
            T* sum = (T*)summed + row * width;
            const T *rest = (const T*)residual + row * width, *second = (const T*)also + (also ? row * width : 0);
            for_vectors(width, [&](int64_t i, int64_t count) {
                Floats values = load_some(from + i, count);
                if (also) values = rounded<T>(values + load_some(second + i, count));
                store_some(sum + i, load_some(rest + i, count) + values, count);
            });
            from = sum;
        }
        rms_norm_row(from, (const T*)weight, width, eps, (T*)normed + row * width);
    });
}
REPLAYED(dsa_rms_norm)

// x [tokens, heads, 2 half] and out, with strides.
extern "C" void dsa_rope(
    const void* x, void* out, const float* cos, const float* sin, int64_t type, int64_t tokens, int64_t heads, int64_t half,
    int64_t x_token, int64_t x_head, int64_t out_token, int64_t out_head, int64_t cos_stride, int64_t sin_stride,
    int64_t interleaved, int64_t threads) {
    const Angles angles{cos, sin, cos_stride, sin_stride, half, interleaved != 0};
    for_typed_rows(type, tokens, threads, [&](int64_t token, auto zero) {
        typedef decltype(zero) T;
        for (int64_t head = 0; head < heads; head++) {
            const T* from = (const T*)x + token * x_token + head * x_head;
            angles.turn(token, from, (T*)out + token * out_token + head * out_head);
        }
    });
}
REPLAYED(dsa_rope)

// gate_up [rows, 2 width] with any row stride, out [rows, width].
extern "C" void dsa_silu_mul(
    const void* gate_up, void* out, int64_t type, int64_t rows, int64_t width, int64_t stride, int64_t threads) {
    for_typed_rows(type, rows, threads, [&](int64_t row, auto zero) {
        typedef decltype(zero) T;
        const T* gate = (const T*)gate_up + row * stride;
        silu_mul_row(gate, gate + width, width, (T*)out + row * width);
    });
}
REPLAYED(dsa_silu_mul)

// x [rows, rank + 2 half]: the latent is normed, what comes after it turned. Returns 1, and does nothing, where a slot
// lies outside of the pool; else 0.
extern "C" int64_t dsa_store_latent(
    const void* x, const void* weight, const float* cos, const float* sin, void* pool, const void* slots, int64_t type,
    int64_t rows, int64_t rank, int64_t half, int64_t x_stride, int64_t cos_stride, int64_t sin_stride, int64_t wide,
    int64_t pages, int64_t page_size, int64_t page_stride, int64_t interleaved, float eps, int64_t threads) {
    const Angles angles{cos, sin, cos_stride, sin_stride, half, interleaved != 0};
    const Pool to{pool, slots, wide, pages, page_size, page_stride, rank + 2 * half};
    if (!to.holds(rows)) return 1;
    for_typed_rows(type, rows, threads, [&](int64_t row, auto zero) {
        typedef decltype(zero) T;
        T* place = to.place<T>(row);
        if (!place) return;
        const T* from = (const T*)x + row * x_stride;
        rms_norm_row(from, (const T*)weight, rank, eps, place);
        angles.turn(row, from + rank, place + rank);
    });
    return 0;
}
REPLAYED(dsa_store_latent)

// x [rows, dim]: normed, and of that the first 2 half turned. Returns as dsa_store_latent.
extern "C" int64_t dsa_store_index_keys(
    const void* x, const float* weight, const float* bias, const float* cos, const float* sin, void* pool,
    const void* slots, int64_t type, int64_t rows, int64_t dim, int64_t half, int64_t x_stride, int64_t cos_stride,
    int64_t sin_stride, int64_t wide, int64_t pages, int64_t page_size, int64_t page_stride, int64_t interleaved,
    float eps, int64_t threads) {
    const Angles angles{cos, sin, cos_stride, sin_stride, half, interleaved != 0};
    const Pool to{pool, slots, wide, pages, page_size, page_stride, dim};
    if (!to.holds(rows)) return 1;
    for_typed_rows(type, rows, threads, [&](int64_t row, auto zero) {
        typedef decltype(zero) T;
        T* place = to.place<T>(row);
        if (!place) return;
        layer_norm_row((const T*)x + row * x_stride, weight, bias, dim, eps, place);
        angles.turn(row, place, place);
    });
    return 0;
}
REPLAYED(dsa_store_index_keys)

// positions [rows, columns] int32, sequences [rows] rows of tables [sequence_count, pages]. Returns 1 where a position
// or a sequence lies outside of the tables, and then not all of out is written; else 0.
extern "C" int64_t dsa_slots_of(
    const int32_t* positions, const int32_t* tables, const int32_t* sequences, int32_t* out, int64_t rows,
    int64_t columns, int64_t sequence_count, int64_t pages, int64_t table_stride, int64_t page_size, int64_t threads) {
    std::atomic<bool> outside{false};
    for_rows(rows, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
        for (int64_t row = first; row < end; row++) {
            if (sequences[row] < 0 || sequences[row] >= sequence_count) {
                outside = true;
                continue;
            }
            const int32_t *table = tables + sequences[row] * table_stride, *from = positions + row * columns;
            for (int64_t i = 0; i < columns; i++) {
                const uint32_t at = (uint32_t)from[i], page = at / (uint32_t)page_size;
                if (from[i] < 0)
                    out[row * columns + i] = -1;
                else if (page >= pages)
                    outside = true;
                else
                    out[row * columns + i] = table[page] * (int32_t)page_size + (int32_t)(at % (uint32_t)page_size);
            }
        }
    });
    return outside;
}
REPLAYED(dsa_slots_of)
