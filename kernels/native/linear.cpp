// Products of few rows in float32: kernels/linear/linear.py and per_head_matmul.py, whose references define them.

#include "products.h"

namespace {

constexpr int64_t OUTPUTS_OF_TILE = 32;
constexpr int64_t TOKENS_OF_TILE = 32;
constexpr int COLUMN_VECTORS = 2;

// out[column] = sum over i of x[i] * weight[i][column], of R rows and COLUMN_VECTORS vectors of columns at a time.
template <int R>
void add_lines(const float* const* x, const float* weight, int64_t stride, int64_t width, int64_t columns,
               float* const* out) {
    for (int64_t c = 0; c < columns; c += COLUMN_VECTORS * LANES) {
        int64_t lanes[COLUMN_VECTORS];
        for (int n = 0; n < COLUMN_VECTORS; n++) {
            const int64_t left = columns - c - n * LANES;
            lanes[n] = left < 0 ? 0 : left < LANES ? left : LANES;
        }
        Floats sums[R][COLUMN_VECTORS] = {};
        for (int64_t i = 0; i < width; i++) {
            Floats line[COLUMN_VECTORS];
            for (int n = 0; n < COLUMN_VECTORS; n++) line[n] = load_some(weight + i * stride + c + n * LANES, lanes[n]);
            for (int r = 0; r < R; r++) {
                for (int n = 0; n < COLUMN_VECTORS; n++) sums[r][n] = plus_product(sums[r][n], Floats{} + x[r][i], line[n]);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int n = 0; n < COLUMN_VECTORS; n++) store_some(out[r] + c + n * LANES, sums[r][n], lanes[n]);
        }
    }
}

}  // namespace

// x [rows, width] with any row stride, weight [outputs, width], out [rows, outputs].
extern "C" void dsa_linear(
    const float* x, const float* weight, float* out, int64_t rows, int64_t width, int64_t outputs, int64_t x_stride,
    int64_t threads) {
    const auto from = [&](int64_t row) { return x + row * x_stride; };
    for_tiles((outputs + OUTPUTS_OF_TILE - 1) / OUTPUTS_OF_TILE, (int)threads, nullptr, 0, [&](int64_t tile, float*) {
        const int64_t first = tile * OUTPUTS_OF_TILE, left = outputs - first;
        const auto to = [&](int64_t row) { return out + row * outputs + first; };
        multiply(weight + first * width, width, width, left < OUTPUTS_OF_TILE ? left : OUTPUTS_OF_TILE, rows, from, to);
    });
}

// x [tokens, heads, inner], weight [heads, inner, outer], out [tokens, heads, outer], with strides; of the weight's last
// two one is 1.
extern "C" void dsa_per_head_matmul(
    const float* x, const float* weight, float* out, int64_t tokens, int64_t heads, int64_t inner, int64_t outer,
    int64_t x_token, int64_t x_head, int64_t weight_head, int64_t weight_inner, int64_t weight_outer,
    int64_t out_token, int64_t out_head, int64_t threads) {
    const int64_t blocks = (tokens + TOKENS_OF_TILE - 1) / TOKENS_OF_TILE;
    for_tiles(heads * blocks, (int)threads, nullptr, 0, [&](int64_t tile, float*) {
        const int64_t head = tile / blocks, first = tile % blocks * TOKENS_OF_TILE;
        const int64_t count = tokens - first < TOKENS_OF_TILE ? tokens - first : TOKENS_OF_TILE;
        const float* matrix = weight + head * weight_head;
        const auto from = [&](int64_t token) { return x + (first + token) * x_token + head * x_head; };
        const auto to = [&](int64_t token) { return out + (first + token) * out_token + head * out_head; };
        if (weight_inner == 1) {
            multiply(matrix, weight_outer, inner, outer, count, from, to);
            return;
        }
        int64_t token = 0;
        for (; token + ROWS_AT_ONCE <= count; token += ROWS_AT_ONCE) {
            const float* some[ROWS_AT_ONCE];
            float* into[ROWS_AT_ONCE];
            for (int r = 0; r < ROWS_AT_ONCE; r++) some[r] = from(token + r), into[r] = to(token + r);
            add_lines<ROWS_AT_ONCE>(some, matrix, weight_inner, inner, outer, into);
        }
        for (; token < count; token++) {
            const float* some = from(token);
            float* into = to(token);
            add_lines<1>(&some, matrix, weight_inner, inner, outer, &into);
        }
    });
}
