// What all CPU kernels share: vectors as wide as the machine's, and tiles of work that threads take in turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
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

static inline float sum_of(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)values);
#else
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
#endif
}

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Runs work(tile, scratch) for every tile below `tiles`, on at most `threads` threads of which the caller is one. Each
// has its own part of the scratch memory, `scratch_size` floats. Work must not throw.
template <class Work>
static void for_tiles(int64_t tiles, int threads, float* scratch, int64_t scratch_size, const Work& work) {
    std::atomic<int64_t> next{0};
    auto run = [&](int thread) {
        for (int64_t tile = next++; tile < tiles; tile = next++) work(tile, scratch + thread * scratch_size);
    };
    std::vector<std::thread> others;
    try {
        if (threads > 1) others.reserve(threads - 1);
        for (int thread = 1; thread < threads && thread < tiles; thread++) others.emplace_back(run, thread);
    } catch (const std::exception&) {
        // No memory or no threads left: those that there are do it all.
    }
    run(0);
    for (std::thread& other : others) other.join();
}
