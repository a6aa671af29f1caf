// The experts of a rank, for few rows each: kernels/moe/expert_mlp.py, whose reference defines it.
//
// A tile is one expert, whose weights are read once for all of its rows; lanes are columns of the weights. Every pair of
// token and expert has a row of results, and these are added in the order of a token's pairs.

#include "products.h"
#include "replay.h"

namespace {

// Bytes for a row that a product takes, of whatever kind the weight is.
int64_t row_room(int64_t width) { return 4 * width + 16; }

}  // namespace

// Bytes of scratch for all threads together: results, gate and up of every pair, the order of the pairs, and rows.
extern "C" int64_t dsa_expert_mlp_scratch(
    int64_t tokens, int64_t pairs, int64_t count, int64_t hidden, int64_t intermediate) {
    return 4 * (pairs * (hidden + 2 * intermediate + 1) + count + 1) + (tokens + 1) * row_room(hidden) +
           pairs * row_room(intermediate) + 128;
}

// x [tokens, hidden], topk_ids and topk_weights [tokens, k], gate_up [count, 2, intermediate, hidden],
// down [count, hidden, intermediate], out [tokens, hidden]. Returns 1, and does nothing, where an expert is not below
// `count`; else 0.
extern "C" int64_t dsa_expert_mlp(
    const void* x, const int32_t* topk_ids, const float* topk_weights, const void* gate_up, const void* gate_up_scale,
    const void* down, const void* down_scale, void* out, char* scratch, int64_t x_type, int64_t out_type,
    int64_t kind, int64_t weight_type, int64_t gate_up_group, int64_t down_group, int64_t power_of_two, int64_t tokens,
    int64_t k, int64_t count, int64_t hidden, int64_t intermediate, int64_t threads) {
    const int64_t pairs = tokens * k;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (topk_ids[pair] >= count) return 1;
    }
    float *results = reinterpret_cast<float*>(scratch), *gates = results + pairs * hidden;  // gates: by expert
    int32_t* ends = reinterpret_cast<int32_t*>(gates + pairs * 2 * intermediate);
    int32_t* order = ends + count + 1;  // pairs, sorted by expert
    char* inner_rows = reinterpret_cast<char*>(order) + round_up(4 * pairs, 64);
    char* token_rows = inner_rows + pairs * row_room(intermediate);
    for (int64_t expert = 0; expert <= count; expert++) ends[expert] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (topk_ids[pair] >= 0) ends[topk_ids[pair] + 1]++;
    }
    for (int64_t expert = 0; expert < count; expert++) ends[expert + 1] += ends[expert];
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (topk_ids[pair] >= 0) order[ends[topk_ids[pair]]++] = (int32_t)pair;
    }
    const Weights first_weights{gate_up, gate_up_scale, kind, weight_type, hidden, gate_up_group, power_of_two};
    const Weights second_weights{down, down_scale, kind, weight_type, intermediate, down_group, power_of_two};
    first_weights.as_kind([&](auto first_matrix) {
        typedef decltype(first_matrix) Weight;
        const Rows tokens_made = rows_for(first_matrix, {x, x_type}, tokens, hidden, hidden, token_rows);
        const Weight second_matrix(second_weights);
        for_tiles(count, (int)threads, nullptr, 0, [&](int64_t expert, float*) {
            const int64_t first = expert ? ends[expert - 1] : 0, rows = ends[expert] - first;
            if (!rows) return;
            float* gate = gates + first * 2 * intermediate;
            const Rows token{tokens_made.at, tokens_made.bytes, order + first, k};
            for (int half = 0; half < 2; half++) {
                const Rows to{gate + half * intermediate, 8 * intermediate};
                multiply(first_matrix.matrix(2 * expert + half, intermediate), hidden, 0, intermediate, rows, token, to, 0);
            }
            Rows inner{gate, 8 * intermediate};
            for (int64_t r = 0; r < rows; r++) {
                float* row = gate + r * 2 * intermediate;
                silu_mul_row(row, row + intermediate, intermediate, row);
            }
            if (!Weight::TAKES_FLOATS) {
                inner = {inner_rows + first * row_room(intermediate), row_room(intermediate)};
                for (int64_t r = 0; r < rows; r++) {
                    typename Weight::X* row = reinterpret_cast<typename Weight::X*>(inner(r));
                    second_matrix.make_row(gate + r * 2 * intermediate, intermediate, row);
                }
            }
            const Rows result{results, 4 * hidden, order + first};
            multiply(second_matrix.matrix(expert, hidden), intermediate, 0, hidden, rows, inner, result, 0);
        });
    });
    float* sum = reinterpret_cast<float*>(token_rows);
    for (int64_t token = 0; token < tokens; token++) {
        std::memset(sum, 0, sizeof(float) * hidden);
        for (int64_t pair = token * k; pair < (token + 1) * k; pair++) {
            if (topk_ids[pair] < 0) continue;
            const float weight = topk_weights[pair], *result = results + pair * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] += weight * result[i];
        }
        Numbers{out, out_type}.write(token * hidden, sum, hidden);
    }
    return 0;
}
REPLAYED(dsa_expert_mlp)
