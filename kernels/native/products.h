// Products of a weight matrix and few rows: the weight is read once, and lanes are its columns. A row's result is summed
// in the same order whatever rows are beside it.
#pragma once

#include "tiles.h"

namespace {

constexpr int OUTPUTS_AT_ONCE = 4;
constexpr int ROWS_AT_ONCE = MANY_REGISTERS ? 4 : 2;
constexpr int64_t AHEAD = 2048;  // floats of the weight: what is read soon is fetched from memory meanwhile

// The sums of some vectors' lanes.
template <int O>
inline void sums_of(const Floats* vectors, float* sums) {
#if defined(__AVX512F__)
    if (O == 4) {
        // Four at once: within 128 bits, and then these.
        const __m512 *v = reinterpret_cast<const __m512*>(vectors);
        const __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        const __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        const __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
        const __m256 high = (__m256)_mm512_extractf64x4_pd((__m512d)all, 1);
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), high);
        _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
        return;
    }
#endif
    for (int o = 0; o < O; o++) sums[o] = sum_of(vectors[o]);
}

// to(row)[output] = weight[output] . from(row), for O outputs and R rows from `row` on; `stride`: of the weight's rows;
// FIRST: these lines have not been read yet.
template <int O, int R, bool FIRST, class From, class To>
void multiply_some(const float* weight, int64_t stride, int64_t width, int64_t row, int64_t output, const From& from,
                   const To& to) {
    const float *x[R], *lines = weight + output * stride;
    for (int r = 0; r < R; r++) x[r] = from(row + r);
    Floats sums[R][O] = {};
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Floats values[R];
        for (int r = 0; r < R; r++) values[r] = load(x[r] + d);
        for (int o = 0; o < O; o++) {
            const Floats line = load(lines + o * stride + d);
            if (FIRST) __builtin_prefetch(lines + o * stride + d + AHEAD);
            for (int r = 0; r < R; r++) sums[r][o] = plus_product(sums[r][o], line, values[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        float results[O];
        sums_of<O>(sums[r], results);
        for (int64_t rest = d; rest < width; rest++) {
            for (int o = 0; o < O; o++)
                results[o] = plus_product(results[o], lines[o * stride + rest], x[r][rest]);
        }
        std::memcpy(to(row + r) + output, results, sizeof results);
    }
}

template <int O, class From, class To>
void multiply_rows(const float* weight, int64_t stride, int64_t width, int64_t rows, int64_t output, const From& from,
                   const To& to) {
    int64_t r = 0;
    if (rows >= ROWS_AT_ONCE) {
        multiply_some<O, ROWS_AT_ONCE, true>(weight, stride, width, r, output, from, to);
        r += ROWS_AT_ONCE;
    } else if (rows) {
        multiply_some<O, 1, true>(weight, stride, width, r, output, from, to);
        r++;
    }
    for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
        multiply_some<O, ROWS_AT_ONCE, false>(weight, stride, width, r, output, from, to);
    for (; r < rows; r++) multiply_some<O, 1, false>(weight, stride, width, r, output, from, to);
}

// The weights of some outputs are multiplied with all rows before the next are read.
template <class From, class To>
void multiply(const float* weight, int64_t stride, int64_t width, int64_t outputs, int64_t rows, const From& from,
              const To& to) {
    int64_t o = 0;
    for (; o + OUTPUTS_AT_ONCE <= outputs; o += OUTPUTS_AT_ONCE)
        multiply_rows<OUTPUTS_AT_ONCE>(weight, stride, width, rows, o, from, to);
    for (; o < outputs; o++) multiply_rows<1>(weight, stride, width, rows, o, from, to);
}

// out = gate / (1 + exp(-gate)) * up, of `width` numbers each; out may be gate.
inline void silu_mul_row(const float* gate, const float* up, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = width - i < LANES ? width - i : LANES;
        const Floats open = load_some(gate + i, count);
        store_some(out + i, open * sigmoid_of(open) * load_some(up + i, count), count);
    }
}

}  // namespace
