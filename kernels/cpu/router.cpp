// The router of the mixture of experts: kernels/moe/router.py, whose reference defines it.

#include <climits>

#include "replay.h"
#include "tiles.h"

namespace {

constexpr int32_t ORDER_OF_MINUS_INFINITY = (int32_t)0xff800000u ^ INT_MAX;

// As an integer of the same order: NaN above everything, -0 as +0.
inline int32_t order_of(float value) {
    if (value != value) return INT_MAX;
    value += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & INT_MAX);
}

// places[0 ... k-1] of the highest of `count` orders, best first, the lower of equals before.
void top(const int32_t* orders, int64_t count, int64_t k, int32_t* places) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (found == k && orders[i] <= orders[places[k - 1]]) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && orders[i] > orders[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = (int32_t)i;
    }
}

struct Scratch {
    float *scores, *choice;  // [experts, rounded up]
    int32_t *orders, *ranks, *best, *open;  // [experts], then [groups] each
};

struct Problem {
    const float *logits, *bias;
    const uint8_t* token_mask;
    int32_t* topk_ids;
    float* topk_weights;
    int64_t count, groups, top_groups, top_k;
    bool normalise;
    float factor;
};

int64_t padded(int64_t count) { return round_up(count, LANES); }

// Leaves the experts of the best groups; those of the others are worth minus infinity.
void close_groups(const Problem& p, const Scratch& s) {
    const int64_t size = p.count / p.groups;
    for (int64_t group = 0; group < p.groups; group++) {
        int32_t two[2];
        top(s.orders + group * size, size, 2, two);
        const float* choice = s.choice + group * size;
        s.ranks[group] = order_of(choice[two[0]] + choice[two[1]]);
        s.open[group] = 0;
    }
    top(s.ranks, p.groups, p.top_groups, s.best);
    for (int64_t i = 0; i < p.top_groups; i++) s.open[s.best[i]] = 1;
    for (int64_t group = 0; group < p.groups; group++) {
        if (s.open[group]) continue;
        for (int64_t i = group * size; i < (group + 1) * size; i++) s.orders[i] = ORDER_OF_MINUS_INFINITY;
    }
}

void route_row(const Problem& p, int64_t row, const Scratch& s) {
    for (int64_t i = 0; i < p.count; i += LANES) {
        const int64_t lanes = p.count - i < LANES ? p.count - i : LANES;
        const Floats score = sigmoid_of(load_some(p.logits + row * p.count + i, lanes));
        store(s.scores + i, score);
        store(s.choice + i, score + load_some(p.bias + i, lanes));
    }
    for (int64_t i = 0; i < p.count; i++) s.orders[i] = order_of(s.choice[i]);
    if (p.groups > 1) close_groups(p, s);
    int32_t* topk_ids = p.topk_ids + row * p.top_k;
    float *topk_weights = p.topk_weights + row * p.top_k, sum = 0.0f;
    top(s.orders, p.count, p.top_k, topk_ids);
    for (int64_t j = 0; j < p.top_k; j++) sum += topk_weights[j] = s.scores[topk_ids[j]];
    for (int64_t j = 0; j < p.top_k; j++) {
        if (p.normalise) topk_weights[j] /= sum + 1e-20f;
        topk_weights[j] *= p.factor;
        if (p.token_mask && !p.token_mask[row]) topk_ids[j] = -1;
    }
}

}  // namespace

// Floats of scratch that a thread needs.
extern "C" int64_t dsa_route_scratch(int64_t count, int64_t groups) { return 3 * padded(count) + 3 * groups; }

// logits [rows, count], bias [count], token_mask [rows] or none; topk_ids and topk_weights [rows, top_k].
extern "C" void dsa_route(
    const float* logits, const float* bias, const uint8_t* token_mask, int32_t* topk_ids, float* topk_weights,
    float* scratch, int64_t rows, int64_t count, int64_t groups, int64_t top_groups, int64_t top_k, int64_t normalise,
    float factor, int64_t threads) {
    const Problem p{
        logits, bias, token_mask, topk_ids, topk_weights, count, groups, top_groups, top_k, normalise != 0, factor};
    for_rows(rows, (int)threads, scratch, dsa_route_scratch(count, groups), [&](int64_t first, int64_t end, float* mine) {
        int32_t* orders = reinterpret_cast<int32_t*>(mine + 2 * padded(count));
        int32_t* of_groups = orders + padded(count);
        const Scratch s{mine, mine + padded(count), orders, of_groups, of_groups + groups, of_groups + 2 * groups};
        for (int64_t row = first; row < end; row++) route_row(p, row, s);
    });
}
REPLAYED(dsa_route)
