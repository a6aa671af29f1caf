// The experts of a rank in float32, for few rows each: kernels/expert_mlp.py, whose reference defines it.
//
// A tile is one expert, whose weights are read once for all of its rows; lanes are columns of the weights. Every pair of
// token and choice has a row of results, and these are added in the order of a token's choices.

#include <cmath>

#include "tiles.h"

namespace {

constexpr int OUTPUTS_AT_ONCE = 4;
constexpr int ROWS_AT_ONCE = MANY_REGISTERS ? 4 : 2;

// to(row)[output] = weight[output] . from(row), for O outputs and R rows from `row` on.
template <int O, int R, class From, class To>
void multiply_some(const float* weight, int64_t width, int64_t row, int64_t output, const From& from, const To& to) {
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = from(row + r);
    Floats sums[O][R] = {};
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Floats values[R];
        for (int r = 0; r < R; r++) values[r] = load(x[r] + d);
        for (int o = 0; o < O; o++) {
            const Floats line = load(weight + (output + o) * width + d);
            for (int r = 0; r < R; r++) sums[o][r] += line * values[r];
        }
    }
    for (int o = 0; o < O; o++) {
        for (int r = 0; r < R; r++) {
            float sum = sum_of(sums[o][r]);
            for (int64_t rest = d; rest < width; rest++) sum += weight[(output + o) * width + rest] * x[r][rest];
            to(row + r)[output + o] = sum;
        }
    }
}

template <int O, class From, class To>
void multiply_rows(const float* weight, int64_t width, int64_t rows, int64_t output, const From& from, const To& to) {
    int64_t r = 0;
    for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
        multiply_some<O, ROWS_AT_ONCE>(weight, width, r, output, from, to);
    for (; r < rows; r++) multiply_some<O, 1>(weight, width, r, output, from, to);
}

// The weights of some outputs are multiplied with all rows before the next are read.
template <class From, class To>
void multiply(const float* weight, int64_t width, int64_t outputs, int64_t rows, const From& from, const To& to) {
    int64_t o = 0;
    for (; o + OUTPUTS_AT_ONCE <= outputs; o += OUTPUTS_AT_ONCE)
        multiply_rows<OUTPUTS_AT_ONCE>(weight, width, rows, o, from, to);
    for (; o < outputs; o++) multiply_rows<1>(weight, width, rows, o, from, to);
}

}  // namespace

// Floats of scratch for all threads together: results, gate and up of every pair, and the order of the pairs.
extern "C" int64_t dsa_expert_mlp_scratch(int64_t pairs, int64_t count, int64_t hidden, int64_t intermediate) {
    return pairs * (hidden + 2 * intermediate + 1) + count + 1;
}

// x [tokens, hidden], experts and weights [tokens, choices], gate_up [count, 2 intermediate, hidden],
// down [count, hidden, intermediate], out [tokens, hidden]. Returns 1, and does nothing, where an expert is not below
// `count`; else 0.
extern "C" int64_t dsa_expert_mlp(
    const float* x, const int32_t* experts, const float* weights, const float* gate_up, const float* down, float* out,
    float* scratch, int64_t tokens, int64_t choices, int64_t count, int64_t hidden, int64_t intermediate,
    int64_t threads) {
    const int64_t pairs = tokens * choices;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (experts[pair] >= count) return 1;
    }
    float *results = scratch, *gates = results + pairs * hidden;  // of each pair; in the order of the experts
    int32_t* ends = reinterpret_cast<int32_t*>(gates + pairs * 2 * intermediate);
    int32_t* order = ends + count + 1;  // pairs, sorted by expert
    for (int64_t expert = 0; expert <= count; expert++) ends[expert] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (experts[pair] >= 0) ends[experts[pair] + 1]++;
    }
    for (int64_t expert = 0; expert < count; expert++) ends[expert + 1] += ends[expert];
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (experts[pair] >= 0) order[ends[experts[pair]]++] = (int32_t)pair;
    }
    for_tiles(count, (int)threads, scratch, 0, [&](int64_t expert, float*) {
        const int64_t first = expert ? ends[expert - 1] : 0, rows = ends[expert] - first;
        const auto token = [&](int64_t r) { return x + order[first + r] / choices * hidden; };
        const auto gate = [&](int64_t r) { return gates + (first + r) * 2 * intermediate; };
        const auto result = [&](int64_t r) { return results + order[first + r] * hidden; };
        multiply(gate_up + expert * 2 * intermediate * hidden, hidden, 2 * intermediate, rows, token, gate);
        for (int64_t r = 0; r < rows; r++) {
            float *g = gate(r), *up = g + intermediate;
            for (int64_t i = 0; i < intermediate; i++) g[i] = g[i] / (1.0f + std::exp(-g[i])) * up[i];
        }
        multiply(down + expert * hidden * intermediate, intermediate, hidden, rows, gate, result);
    });
    for (int64_t token = 0; token < tokens; token++) {
        float* sum = out + token * hidden;
        std::memset(sum, 0, sizeof(float) * hidden);
        for (int64_t pair = token * choices; pair < (token + 1) * choices; pair++) {
            if (experts[pair] < 0) continue;
            const float weight = weights[pair], *result = results + pair * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] += weight * result[i];
        }
    }
    return 0;
}
