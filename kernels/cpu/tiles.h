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
        typedef uint16_t Short __attribute__((vector_size(2 * L)));          \
        typedef int8_t Byte __attribute__((vector_size(L)));                 \
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

// Numbers as tensors hold them; all arithmetic is in float32, rounded to nearest, ties to even.
struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};
#if defined(__aarch64__)
typedef __fp16 Half;
#elif !defined(__F16C__)
typedef _Float16 Half;
#endif
typedef Vectors<LANES>::Short Shorts;

// Integers that are widened, or cut; compilers take detours for some widths.
static inline Ints widened(Shorts values) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu16_epi32((__m256i)values);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu16_epi32((__m128i)values);
#else
    return __builtin_convertvector(values, Ints);
#endif
}

static inline Ints widened(Vectors<LANES>::Byte values) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32((__m128i)values);
#elif defined(__AVX2__)
    int64_t some;
    std::memcpy(&some, &values, sizeof some);
    return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(some));
#else
    return __builtin_convertvector(values, Ints);
#endif
}

static inline Shorts shorts_of(Vectors<LANES>::Byte values) {
#if defined(__AVX512F__)
    return (Shorts)_mm256_cvtepi8_epi16((__m128i)values);
#elif defined(__AVX2__)
    int64_t some;
    std::memcpy(&some, &values, sizeof some);
    return (Shorts)_mm_cvtepi8_epi16(_mm_cvtsi64_si128(some));
#else
    return __builtin_convertvector(values, Shorts);
#endif
}

static inline Shorts cut(Ints values) {
#if defined(__AVX512F__)
    return (Shorts)_mm512_cvtepi32_epi16((__m512i)values);
#else
    return __builtin_convertvector(values, Shorts);
#endif
}

static inline Floats load(const bfloat16* from) {
    Shorts bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(widened(bits) << 16);
}

static inline void store(bfloat16* to, Floats values) {
    const Ints bits = (Ints)values, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    store(static_cast<void*>(to), cut(values == values ? rounded : Ints{} + 0x7fc0));
}

static inline Floats load(const float16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Floats values;
    Half some[LANES];
    std::memcpy(some, from, sizeof some);
    for (int lane = 0; lane < LANES; lane++) values[lane] = (float)some[lane];
    return values;
#endif
}

static inline void store(float16* to, Floats values) {
#if defined(__AVX512F__)
    store(static_cast<void*>(to), _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    store(static_cast<void*>(to), _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
#else
    Half some[LANES];
    for (int lane = 0; lane < LANES; lane++) some[lane] = (Half)values[lane];
    std::memcpy(to, some, sizeof some);
#endif
}

static inline float number(float value) { return value; }
static inline float number(bfloat16 value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
static inline float number(float16 value) {
#if defined(__F16C__)
    return _cvtsh_ss(value.bits);
#else
    Half half;
    std::memcpy(&half, &value, sizeof half);
    return (float)half;
#endif
}

// The first `count` lanes; the others are 0, or are not written.
template <class T>
static inline Floats load_some(const T* from, int64_t count) {
    if (count == LANES) return load(from);
    T some[LANES] = {};
    std::memcpy(some, from, sizeof(T) * count);
    return load(some);
}

template <class T>
static inline void store_some(T* to, Floats values, int64_t count) {
    if (count == LANES) {
        store(to, values);
        return;
    }
    T some[LANES];
    store(some, values);
    std::memcpy(to, some, sizeof(T) * count);
}

// What T can hold of the numbers.
template <class T>
static inline Floats rounded(Floats values) {
    T some[LANES];
    store(some, values);
    return load(some);
}

template <>
inline Floats rounded<float>(Floats values) {
    return values;
}

// Types by the numbers that kernels/runtime/cpu.py gives them: work(T{}).
template <class Work>
static auto of_type(int64_t type, const Work& work) {
    return type == 1 ? work(bfloat16{}) : type == 2 ? work(float16{}) : work(float{});
}

static inline int64_t bytes_of(int64_t type) { return type == 0 ? 4 : 2; }

// Some numbers of a tensor, whose type is known when it is read.
struct Numbers {
    const void* at;
    int64_t type;

    // As floats: those themselves, or a copy in `into`.
    const float* read(int64_t offset, int64_t count, float* into) const {
        if (type == 0) return static_cast<const float*>(at) + offset;
        copy(offset, count, into);
        return into;
    }

    void copy(int64_t offset, int64_t count, float* into) const {
        of_type(type, [&](auto zero) {
            const auto* from = static_cast<const decltype(zero)*>(at) + offset;
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) store(into + i, load(from + i));
            if (i < count) store_some(into + i, load_some(from + i, count - i), count - i);
        });
    }

    // The tensor may be written where it is an output.
    void write(int64_t offset, const float* values, int64_t count) const {
        of_type(type, [&](auto zero) {
            auto* to = static_cast<decltype(zero)*>(const_cast<void*>(at)) + offset;
            for (int64_t i = 0; i < count; i += LANES) {
                const int64_t lanes = count - i < LANES ? count - i : LANES;
                store_some(to + i, load_some(values + i, lanes), lanes);
            }
        });
    }
};

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

// Says that values are to stay in a register: compilers would load them again for each use.
template <class V>
static inline void stay_loaded(V& values) {
#if defined(__AVX512F__)
    asm("" : "+v"(values));
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

static inline int32_t sum_of(Ints values) {
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
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
