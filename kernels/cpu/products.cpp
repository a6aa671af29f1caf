// The products of a weight, in one template for all kinds of it.

#include "products.h"

namespace {

constexpr int OUTPUTS_AT_ONCE = 4;
// Bytes of the weight: what is read soon is fetched from memory meanwhile, byte after byte, as its prefetcher expects.
constexpr int64_t AHEAD = 8192;

// The sums of four vectors' lanes: within 128 bits, and then these.
template <class V>
inline void sums_of_four(const V* v, void* sums) {
#if defined(__AVX512F__)
    const auto low = [](V a, V b) { return (V)_mm512_unpacklo_ps((__m512)a, (__m512)b); };
    const auto high = [](V a, V b) { return (V)_mm512_unpackhi_ps((__m512)a, (__m512)b); };
    const V ab = low(v[0], v[1]) + high(v[0], v[1]), cd = low(v[2], v[3]) + high(v[2], v[3]);
    const V all = (V)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd) + (V)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    const V half = all + (V)_mm512_shuffle_f32x4((__m512)all, (__m512)all, 0x4e);
    const V whole = half + (V)_mm512_shuffle_f32x4((__m512)half, (__m512)half, 0xb1);
#elif defined(__AVX__)
    const auto low = [](V a, V b) { return (V)_mm256_unpacklo_ps((__m256)a, (__m256)b); };
    const auto high = [](V a, V b) { return (V)_mm256_unpackhi_ps((__m256)a, (__m256)b); };
    const V ab = low(v[0], v[1]) + high(v[0], v[1]), cd = low(v[2], v[3]) + high(v[2], v[3]);
    const V all = (V)_mm256_unpacklo_pd((__m256d)ab, (__m256d)cd) + (V)_mm256_unpackhi_pd((__m256d)ab, (__m256d)cd);
    const V whole = all + (V)_mm256_permute2f128_ps((__m256)all, (__m256)all, 1);
#else
    V whole{};
    for (int o = 0; o < 4; o++) {
        for (int lane = 0; lane < LANES; lane++) whole[o] += v[o][lane];
    }
#endif
    std::memcpy(sums, &whole, 16);
}

// R rows from `row` on and OUTPUTS_AT_ONCE outputs, of which those below `end` exist; FIRST: the weight has not been read
// yet.
template <int R, bool FIRST, class Weight>
void multiply_some(const Weight& weight, int64_t width, int64_t row, int64_t output, int64_t end, const Rows& from,
                   const Rows& to) {
    constexpr int64_t STEP = Weight::STEP;
    constexpr int O = OUTPUTS_AT_ONCE;
    const typename Weight::X* x[R];
    for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const typename Weight::X*>(from(row + r));
    const Weight lines[O] = {weight.row(output), weight.row(output + 1 < end ? output + 1 : output),
                             weight.row(output + 2 < end ? output + 2 : output),
                             weight.row(output + 3 < end ? output + 3 : output)};
    const char* start = static_cast<const char*>(lines[0].place(0));
    const int64_t group = O * (static_cast<const char*>(lines[0].place(width)) - start);
    const char* next = start + (group > AHEAD ? group : AHEAD);
    typename Weight::Sum sums[R][O] = {};
    const auto add = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
        decltype(Weight::read(x[0], 0)) values[R];
        for (int r = 0; r < R; r++) {
            values[r] = Weight::read(x[r] + d, count);
            stay_loaded(values[r]);
        }
        if (FIRST) {
            const char* here = static_cast<const char*>(lines[0].place(d));
            const int64_t bytes = O * (static_cast<const char*>(lines[0].place(d + STEP)) - here);
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + O * (here - start) + i, 0, 2);
        }
        for (int o = 0; o < O; o++) {
            const auto line = lines[o].line(d, count);
            for (int r = 0; r < R; r++) sums[r][o] = Weight::add(sums[r][o], line, values[r]);
        }
    };
    int64_t d = 0;
    for (; d + STEP <= width; d += STEP) add(d, STEP);
    if (d < width) add(d, width - d);
    for (int r = 0; r < R; r++) {
        decltype(sums[0][0][0] + 0) whole[O];
        float results[O];
        sums_of_four(sums[r], whole);
        for (int o = 0; o < O; o++) results[o] = lines[o].result(whole[o], x[r], width);
        float* out = reinterpret_cast<float*>(to(row + r)) + output;
        if (end - output >= O)
            std::memcpy(out, results, sizeof results);
        else
            std::memcpy(out, results, 4 * (end - output));
    }
}

}  // namespace

template <class Weight>
void multiply(const Weight& weight, int64_t width, int64_t first, int64_t end, int64_t rows, const Rows& from,
              const Rows& to, int64_t type) {
    float floats[ROWS_OF_TILE * OUTPUTS_OF_TILE];  // results that become another type
    for (int64_t block = first; block < end; block += OUTPUTS_OF_TILE) {
        const int64_t last = block + OUTPUTS_OF_TILE < end ? block + OUTPUTS_OF_TILE : end;
        const Rows made = type == 0 ? to : Rows{floats - block, 4 * OUTPUTS_OF_TILE};
        // The weights of some outputs are multiplied with all rows before the next are read.
        for (int64_t o = block; o < last; o += OUTPUTS_AT_ONCE) {
            int64_t r = rows < ROWS_AT_ONCE ? 1 : ROWS_AT_ONCE;
            if (rows >= ROWS_AT_ONCE)
                multiply_some<ROWS_AT_ONCE, true>(weight, width, 0, o, last, from, made);
            else if (rows)
                multiply_some<1, true>(weight, width, 0, o, last, from, made);
            for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
                multiply_some<ROWS_AT_ONCE, false>(weight, width, r, o, last, from, made);
            for (; r < rows; r++) multiply_some<1, false>(weight, width, r, o, last, from, made);
        }
        for (int64_t r = 0; type != 0 && r < rows; r++) {
            const Numbers into{to(r), type};
            into.write(block, floats + r * OUTPUTS_OF_TILE, last - block);
        }
    }
}

#define DSA_MULTIPLY(Weight)                                                                                           \
    template void multiply<Weight>(                                                                                    \
        const Weight&, int64_t, int64_t, int64_t, int64_t, const Rows&, const Rows&, int64_t);
DSA_MULTIPLY(Plain<float>)
DSA_MULTIPLY(Plain<bfloat16>)
DSA_MULTIPLY(Plain<float16>)
DSA_MULTIPLY(Int8)
DSA_MULTIPLY(Fp8)
DSA_MULTIPLY(Int4<float>)
DSA_MULTIPLY(Int4<bfloat16>)
DSA_MULTIPLY(Int4<float16>)
#undef DSA_MULTIPLY
