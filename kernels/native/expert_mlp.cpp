// The experts of a rank in float32, for few rows each: kernels/moe/expert_mlp.py, whose reference defines it.
//
// A tile is one expert, whose weights are read once for all of its rows; lanes are columns of the weights. Every pair of
// token and expert has a row of results, and these are added in the order of a token's pairs.

#include "products.h"

// Floats of scratch for all threads together: results, gate and up of every pair, and the order of the pairs.
extern "C" int64_t dsa_expert_mlp_scratch(int64_t pairs, int64_t count, int64_t hidden, int64_t intermediate) {
    return pairs * (hidden + 2 * intermediate + 1) + count + 1;
}

// x [tokens, hidden], topk_ids and topk_weights [tokens, k], gate_up [count, 2 intermediate, hidden],
// down [count, hidden, intermediate], out [tokens, hidden]. Returns 1, and does nothing, where an expert is not below
// `count`; else 0.
extern "C" int64_t dsa_expert_mlp(
    const float* x, const int32_t* topk_ids, const float* topk_weights, const float* gate_up, const float* down,
    float* out, float* scratch, int64_t tokens, int64_t k, int64_t count, int64_t hidden, int64_t intermediate,
    int64_t threads) {
    const int64_t pairs = tokens * k;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (topk_ids[pair] >= count) return 1;
    }
    float *results = scratch, *gates = results + pairs * hidden;  // of each pair; in the order of the experts
    int32_t* ends = reinterpret_cast<int32_t*>(gates + pairs * 2 * intermediate);
    int32_t* order = ends + count + 1;  // pairs, sorted by expert
    for (int64_t expert = 0; expert <= count; expert++) ends[expert] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (topk_ids[pair] >= 0) ends[topk_ids[pair] + 1]++;
    }
    for (int64_t expert = 0; expert < count; expert++) ends[expert + 1] += ends[expert];
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (topk_ids[pair] >= 0) order[ends[topk_ids[pair]]++] = (int32_t)pair;
    }
    for_tiles(count, (int)threads, scratch, 0, [&](int64_t expert, float*) {
        const int64_t first = expert ? ends[expert - 1] : 0, rows = ends[expert] - first;
        const auto token = [&](int64_t r) { return x + order[first + r] / k * hidden; };
        const auto gate = [&](int64_t r) { return gates + (first + r) * 2 * intermediate; };
        const auto result = [&](int64_t r) { return results + order[first + r] * hidden; };
        multiply(gate_up + expert * 2 * intermediate * hidden, hidden, hidden, 2 * intermediate, rows, token, gate);
        for (int64_t r = 0; r < rows; r++) {
            float* g = gate(r);
            silu_mul_row(g, g + intermediate, intermediate, g);
        }
        multiply(down + expert * hidden * intermediate, intermediate, intermediate, hidden, rows, gate, result);
    });
    for (int64_t token = 0; token < tokens; token++) {
        float* sum = out + token * hidden;
        std::memset(sum, 0, sizeof(float) * hidden);
        for (int64_t pair = token * k; pair < (token + 1) * k; pair++) {
            if (topk_ids[pair] < 0) continue;
            const float weight = topk_weights[pair], *result = results + pair * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] += weight * result[i];
        }
    }
    return 0;
}
