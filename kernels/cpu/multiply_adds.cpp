// The most that a core multiplies and adds: from registers to registers, for measure/ceilings.py.

#include "tiles.h"

namespace {

constexpr int CHAINS = 12;  // independent sums: more than are in flight at once, few enough that all stay in registers

}  // namespace

// Takes `steps` steps on values[0 .. LANES), which change, by one thread; returns the operations, two a multiply-add.
extern "C" int64_t dsa_multiply_adds(float* values, int64_t steps) {
    const Floats factor = Floats{} + 0.5f, summand = load(values);
    Floats sums[CHAINS];
    for (int c = 0; c < CHAINS; c++) sums[c] = summand + (float)c;
    for (int64_t step = 0; step < steps; step++) {
        for (int c = 0; c < CHAINS; c++) sums[c] = plus_product(summand, sums[c], factor);
    }
    Floats all = sums[0];
    for (int c = 1; c < CHAINS; c++) all += sums[c];
    store(values, all);
    return 2 * LANES * CHAINS * steps;
}
