// What all CPU kernels share: vectors as wide as the machine's, and tiles of work that threads take in turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "threads.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr bool MANY_REGISTERS = true;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr bool MANY_REGISTERS = false;
#else
constexpr int LANES = 4;
#if defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;
#else
constexpr bool MANY_REGISTERS = false;
#endif
#endif

// A vector of L floats, and of as many integers; what is loaded need not be aligned.
template <int L>
struct Vectors;
#define DSA_VECTORS(L)                                                       \
    template <>                                                              \
    struct Vectors<L> {                                                      \
        typedef float Float __attribute__((vector_size(4 * L)));             \
        typedef int32_t Int __attribute__((vector_size(4 * L)));             \
    };
DSA_VECTORS(4)
DSA_VECTORS(8)
DSA_VECTORS(16)
#undef DSA_VECTORS

typedef Vectors<LANES>::Float Floats;
typedef Vectors<LANES>::Int Ints;

template <class V = Floats>
static inline V load(const float* from) {
    V values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

template <class V>
static inline void store(void* to, V values) {
    std::memcpy(to, &values, sizeof values);
}

// The first `count` lanes; the others are 0, or are not written.
static inline Floats load_some(const float* from, int64_t count) {
    if (count == LANES) return load(from);
    Floats values{};
    std::memcpy(&values, from, sizeof(float) * count);
    return values;
}

static inline void store_some(float* to, Floats values, int64_t count) {
    if (count == LANES)
        store(to, values);
    else
        std::memcpy(to, &values, sizeof(float) * count);
}

// sum + a * b, rounded once where the machine does so. Said aloud: for some processors (Zen) compilers take fused
// multiply-adds in some instances of a loop and not in others, and a row's result would depend on how many are beside it.
static inline Floats plus_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

static inline float plus_product(float sum, float a, float b) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, sum);
#else
    return sum + a * b;
#endif
}

static inline float sum_of(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)values);
#else
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
#endif
}

// exp(x) for x <= 0, to 1 or 2 units in the last bit; at least 4e-38; NaN stays NaN.
template <int L>
static inline typename Vectors<L>::Float exp_of(typename Vectors<L>::Float x) {
    typedef typename Vectors<L>::Float V;
    typedef typename Vectors<L>::Int I;
    x = x < -86.0f ? V{} - 86.0f : x;
    const V shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the fraction is rounded away
    const V n = shifted - 12582912.0f;
    V r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V y = V{} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    I bits, exponent;
    std::memcpy(&bits, &y, sizeof bits);
    std::memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 23;
    V result;
    std::memcpy(&result, &bits, sizeof result);
    return y == y ? result : y;
}

// 1 / (1 + exp(-x)); 0 below -86, where exp_of stops falling: x times it has to vanish too, however low x is.
static inline Floats sigmoid_of(Floats x) {
    const Floats small = exp_of<LANES>(x < 0.0f ? x : -x);  // exp(-|x|)
    const Floats result = (x < 0.0f ? small : Floats{} + 1.0f) / (1.0f + small);
    return x < -86.0f ? Floats{} : result;
}

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Runs work(tile, scratch) for every tile below `tiles`, on at most `threads` threads of which the caller is one. Each
// has its own part of the scratch memory, `scratch_size` floats. Work must not throw.
template <class Work>
static void for_tiles(int64_t tiles, int threads, float* scratch, int64_t scratch_size, const Work& work) {
    if (threads <= 1 || tiles <= 1) {
        for (int64_t tile = 0; tile < tiles; tile++) work(tile, scratch);
        return;
    }
    std::atomic<int64_t> next{0};
    auto run = [&](int thread) {
        for (int64_t tile = next++; tile < tiles; tile = next++) work(tile, scratch + thread * scratch_size);
    };
    const auto call = [](void* data, int thread) { (*static_cast<decltype(run)*>(data))(thread); };
    run_on_threads(tiles < threads ? (int)tiles : threads, call, &run);
}

// The same for rows: work(first, end, scratch) for blocks of them.
template <class Work>
static void for_rows(int64_t rows, int threads, float* scratch, int64_t scratch_size, const Work& work) {
    constexpr int64_t BLOCK = 64;
    for_tiles((rows + BLOCK - 1) / BLOCK, threads, scratch, scratch_size, [&](int64_t block, float* mine) {
        const int64_t first = block * BLOCK;
        work(first, first + BLOCK < rows ? first + BLOCK : rows, mine);
    });
}
