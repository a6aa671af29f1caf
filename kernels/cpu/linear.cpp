// Products of few rows: kernels/linear/linear.py, per_head_matmul.py, quantized_linear.py and block_scaled_matmul.py, whose
// references define them.

#include <memory>
#include <type_traits>

#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t TOKENS_OF_TILE = 32;
constexpr int64_t LINES_AHEAD = 32;  // are fetched from memory meanwhile

// to(row)[column] = sum over i of from(row)[i] * weight[i][column], of R rows from `row` on and some vectors of columns
// at a time: few rows wait for memory, which gives long pieces of a line sooner.
template <int R, class T>
void add_lines(int64_t row, const T* weight, int64_t stride, int64_t width, int64_t columns, const Rows& from,
               const Rows& to, int64_t type) {
    constexpr int COLUMN_VECTORS = R == 1 ? 8 : 4;
    constexpr int64_t COLUMNS = COLUMN_VECTORS * LANES;
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const float*>(from(row + r));
    const auto add = [&](int64_t c, auto whole) __attribute__((always_inline)) {
        int64_t lanes[COLUMN_VECTORS];
        for (int n = 0; n < COLUMN_VECTORS; n++) {
            const int64_t left = whole ? LANES : columns - c - n * LANES;
            lanes[n] = left < 0 ? 0 : left < LANES ? left : LANES;
        }
        Floats sums[R][COLUMN_VECTORS] = {};
        for (int64_t i = 0; i < width; i++) {
            Floats line[COLUMN_VECTORS];
            for (int n = 0; n < COLUMN_VECTORS; n++) {
                line[n] = load_some(weight + i * stride + c + n * LANES, lanes[n]);
                stay_loaded(line[n]);
                if (row == 0) __builtin_prefetch(weight + (i + LINES_AHEAD) * stride + c + n * LANES, 0, 2);
            }
            for (int r = 0; r < R; r++) {
                for (int n = 0; n < COLUMN_VECTORS; n++) sums[r][n] = plus_product(sums[r][n], x[r][i] - Floats{}, line[n]);
            }
        }
        for (int r = 0; r < R; r++) {
            float results[COLUMNS];
            for (int n = 0; n < COLUMN_VECTORS; n++) store(results + n * LANES, sums[r][n]);
            Numbers{to(row + r), type}.write(c, results, whole ? COLUMNS : columns - c);
        }
    };
    int64_t c = 0;
    for (; c + COLUMNS <= columns; c += COLUMNS) add(c, std::true_type());
    if (c < columns) add(c, std::false_type());
}

}  // namespace

// x [rows, width] with any row stride, weight [outputs, width], out [rows, outputs]; x and out of one type.
extern "C" void dsa_linear(
    const void* x, const void* weight, const void* scale, void* out, int64_t type, int64_t kind,
    int64_t weight_type, int64_t group, int64_t power_of_two, int64_t rows, int64_t width, int64_t outputs, int64_t x_stride,
    int64_t threads) {
    Weights{weight, scale, kind, weight_type, width, group, power_of_two}.as_kind([&](auto matrix) {
        const bool made = !matrix.TAKES_FLOATS || type != 0;
        const std::unique_ptr<char[]> scratch(made ? new char[(rows + 1) * (4 * width + 16)] : nullptr);
        const Rows from = rows_for(matrix, {x, type}, rows, width, x_stride, scratch.get());
        const int64_t across = (outputs + OUTPUTS_OF_TILE - 1) / OUTPUTS_OF_TILE, line = outputs * bytes_of(type);
        const int64_t down = (rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE;
        for_tiles(across * down, (int)threads, nullptr, 0, [&](int64_t tile, float*) {
            const int64_t first = tile % across * OUTPUTS_OF_TILE, end = first + OUTPUTS_OF_TILE;
            const int64_t top = tile / across * ROWS_OF_TILE, count = rows - top < ROWS_OF_TILE ? rows - top : ROWS_OF_TILE;
            const Rows some{static_cast<const char*>(from.at) + top * from.bytes, from.bytes};
            const Rows to{static_cast<char*>(out) + top * line, line};
            multiply(matrix, width, first, end < outputs ? end : outputs, count, some, to, type);
        });
    });
}
REPLAYED(dsa_linear)

// x [tokens, heads, inner], weight [heads, inner, outer], out [tokens, heads, outer], with strides; of the weight's last
// two one is 1.
extern "C" void dsa_per_head_matmul(
    const void* x, const void* weight, void* out, int64_t type, int64_t tokens, int64_t heads,
    int64_t inner, int64_t outer, int64_t x_token, int64_t x_head, int64_t weight_head, int64_t weight_inner,
    int64_t weight_outer, int64_t out_token, int64_t out_head, int64_t threads) {
    const int64_t blocks = (tokens + TOKENS_OF_TILE - 1) / TOKENS_OF_TILE, bytes = bytes_of(type);
    const int64_t size = TOKENS_OF_TILE * inner;
    const std::unique_ptr<float[]> scratch(type != 0 ? new float[threads * size] : nullptr);
    for_tiles(heads * blocks, (int)threads, scratch.get(), size, [&](int64_t tile, float* mine) {
        const int64_t head = tile / blocks, first = tile % blocks * TOKENS_OF_TILE;
        const int64_t count = tokens - first < TOKENS_OF_TILE ? tokens - first : TOKENS_OF_TILE;
        Rows from{static_cast<const float*>(x) + first * x_token + head * x_head, 4 * x_token};
        if (type != 0) {
            for (int64_t t = 0; t < count; t++)
                Numbers{x, type}.copy((first + t) * x_token + head * x_head, inner, mine + t * inner);
            from = {mine, 4 * inner};
        }
        const Rows to{static_cast<char*>(out) + (first * out_token + head * out_head) * bytes, out_token * bytes};
        of_type(type, [&](auto zero) {
            typedef decltype(zero) T;
            const T* matrix = static_cast<const T*>(weight) + head * weight_head;
            if (weight_inner == 1) {
                multiply(Plain<T>({matrix, nullptr, 0, type, weight_outer, 0, 0}), inner, 0, outer, count, from, to, type);
                return;
            }
            int64_t t = 0;
            for (; t + ROWS_AT_ONCE <= count; t += ROWS_AT_ONCE)
                add_lines<ROWS_AT_ONCE>(t, matrix, weight_inner, inner, outer, from, to, type);
            for (; t < count; t++) add_lines<1>(t, matrix, weight_inner, inner, outer, from, to, type);
        });
    });
}
REPLAYED(dsa_per_head_matmul)
