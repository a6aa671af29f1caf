// What is done to the rows of a step, in float32: kernels/rows/rms_norm.py, rope.py, silu_mul.py, store_latent.py,
// store_index_keys.py and paged.py, whose references define it.
//
// A tile is some rows. Each is read once, and written once to where it is to go.

#include <cmath>

#include "products.h"

namespace {

// out = weight * x / sqrt(mean(x^2) + eps)
void rms_norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
    Floats squares{};
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats values = load_some(x + i, width - i < LANES ? width - i : LANES);
        squares += values * values;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = weight[i] * (x[i] * scale);
}

// out = weight * (x - mean) / sqrt(variance + eps) + bias
void layer_norm_row(const float* x, const float* weight, const float* bias, int64_t width, float eps, float* out) {
    Floats sums{}, squares{};
    for (int64_t i = 0; i < width; i += LANES) sums += load_some(x + i, width - i < LANES ? width - i : LANES);
    const float mean = sum_of(sums) / width;
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = width - i < LANES ? width - i : LANES;
        Floats values = load_some(x + i, count) - mean;
        for (int64_t lane = count; lane < LANES; lane++) values[lane] = 0.0f;
        squares += values * values;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// The first 2 * half numbers of a row, in pairs; out may be x.
void turn_row(const float* x, const float* cos, const float* sin, int64_t half, bool interleaved, float* out) {
    const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[step * i], b = x[step * i + other];
        out[step * i] = a * cos[i] - b * sin[i];
        out[step * i + other] = b * cos[i] + a * sin[i];
    }
}

// Angles of the tokens' rows.
struct Angles {
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, half;
    bool interleaved;

    void turn(int64_t token, const float* x, float* out) const {
        turn_row(x, cos + token * cos_stride, sin + token * sin_stride, half, interleaved, out);
    }
};

// Where rows go: to slots of a pool, or without slots row by row.
struct Pool {
    float* values;
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
    float* place(int64_t row) const {
        const int64_t at = slot(row);
        return at < 0 ? nullptr : values + at / page_size * page_stride + at % page_size * width;
    }
};

}  // namespace

// x [rows, width] with any row stride; with a residual [rows, width], their sum is written and normed, and `also`, if
// there is one, is added to x first.
extern "C" void dsa_rms_norm(
    const float* x, const float* also, const float* residual, const float* weight, float* normed, float* summed, int64_t rows,
    int64_t width, int64_t x_stride, float eps, int64_t threads) {
    for_rows(rows, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
        for (int64_t row = first; row < end; row++) {
            const float* from = x + row * x_stride;
            if (residual) {
                float* sum = summed + row * width;
                const float *rest = residual + row * width, *second = also ? also + row * width : nullptr;
                for (int64_t i = 0; i < width; i++) sum[i] = rest[i] + (second ? from[i] + second[i] : from[i]);
                from = sum;
            }
            rms_norm_row(from, weight, width, eps, normed + row * width);
        }
    });
}

// x [tokens, heads, 2 half] and out, with strides.
extern "C" void dsa_rope(
    const float* x, float* out, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t half,
    int64_t x_token, int64_t x_head, int64_t out_token, int64_t out_head, int64_t cos_stride, int64_t sin_stride,
    int64_t interleaved, int64_t threads) {
    const Angles angles{cos, sin, cos_stride, sin_stride, half, interleaved != 0};
    for_rows(tokens, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
        for (int64_t token = first; token < end; token++) {
            for (int64_t head = 0; head < heads; head++)
                angles.turn(token, x + token * x_token + head * x_head, out + token * out_token + head * out_head);
        }
    });
}

// gate_up [rows, 2 width] with any row stride, out [rows, width].
extern "C" void dsa_silu_mul(
    const float* gate_up, float* out, int64_t rows, int64_t width, int64_t stride, int64_t threads) {
    for_rows(rows, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
        for (int64_t row = first; row < end; row++) {
            const float* gate = gate_up + row * stride;
            silu_mul_row(gate, gate + width, width, out + row * width);
        }
    });
}

// x [rows, rank + 2 half]: the latent is normed, what comes after it turned. Returns 1, and does nothing, where a slot
// lies outside of the pool; else 0.
extern "C" int64_t dsa_store_latent(
    const float* x, const float* weight, const float* cos, const float* sin, float* pool, const void* slots,
    int64_t rows, int64_t rank, int64_t half, int64_t x_stride, int64_t cos_stride, int64_t sin_stride, int64_t wide,
    int64_t pages, int64_t page_size, int64_t page_stride, int64_t interleaved, float eps, int64_t threads) {
    const Angles angles{cos, sin, cos_stride, sin_stride, half, interleaved != 0};
    const Pool to{pool, slots, wide, pages, page_size, page_stride, rank + 2 * half};
    if (!to.holds(rows)) return 1;
    for_rows(rows, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
        for (int64_t row = first; row < end; row++) {
            float* place = to.place(row);
            if (!place) continue;
            rms_norm_row(x + row * x_stride, weight, rank, eps, place);
            angles.turn(row, x + row * x_stride + rank, place + rank);
        }
    });
    return 0;
}

// x [rows, dim]: normed, and of that the first 2 half turned. Returns as dsa_store_latent.
extern "C" int64_t dsa_store_index_keys(
    const float* x, const float* weight, const float* bias, const float* cos, const float* sin, float* pool,
    const void* slots, int64_t rows, int64_t dim, int64_t half, int64_t x_stride, int64_t cos_stride,
    int64_t sin_stride, int64_t wide, int64_t pages, int64_t page_size, int64_t page_stride, int64_t interleaved,
    float eps, int64_t threads) {
    const Angles angles{cos, sin, cos_stride, sin_stride, half, interleaved != 0};
    const Pool to{pool, slots, wide, pages, page_size, page_stride, dim};
    if (!to.holds(rows)) return 1;
    for_rows(rows, (int)threads, nullptr, 0, [&](int64_t first, int64_t end, float*) {
        for (int64_t row = first; row < end; row++) {
            float* place = to.place(row);
            if (!place) continue;
            layer_norm_row(x + row * x_stride, weight, bias, dim, eps, place);
            angles.turn(row, place, place);
        }
    });
    return 0;
}

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
