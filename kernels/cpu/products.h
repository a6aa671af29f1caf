// Products of a weight matrix and few rows: the weight is read once, as it is stored, and lanes are its columns. A row's
// result is summed in the same order whatever rows, and however many, are beside it.
#pragma once

#include <cmath>

#include "tiles.h"

constexpr int ROWS_AT_ONCE = MANY_REGISTERS ? 4 : 2;
constexpr int64_t OUTPUTS_OF_TILE = 32;
constexpr int64_t ROWS_OF_TILE = 64;  // stay in the core's cache while its outputs are made
constexpr int64_t BLOCK = 128;  // columns, and rows, with one scale in FP8

// The largest magnitude; NaN where a number is not finite.
inline float largest_of(const float* x, int64_t count) {
    Floats largest{}, lost{};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = load_some(x + i, count - i < LANES ? count - i : LANES), size = value < 0.0f ? -value : value;
        largest = largest > size ? largest : size;
        lost += value - value;
    }
    float most = 0.0f;
    for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    return most + sum_of(lost);
}

// A weight [outputs, width] as Python names it. Its kind: 0 numbers, 3 int8, 4 FP8, 5 and 6 INT4; `type`: of numbers, and
// of the scales of INT4.
struct Weights {
    const void *at, *scale;
    int64_t kind, type, width, group, power_of_two;

    template <class Work>
    auto as_kind(const Work& work) const;
};

constexpr int64_t ROUNDED = 3;  // type of x: rows as `make_row` makes them

// A kind of weight [outputs, width] begins at `at`, its rows `stride` numbers apart. It says of which type a row of x is
// for it (X), of how many columns a vector is (STEP), and makes such rows of floats: `make_row`, of `row_bytes`.

// What weights share that are multiplied by floats.
struct ByFloats {
    typedef float X;
    typedef Floats Sum;
    static constexpr int STEP = LANES;
    static constexpr bool TAKES_FLOATS = false;  // rows of x as they are
    static Floats read(const float* x, int64_t count) { return load_some(x, count); }
    static Floats add(Floats sum, Floats line, Floats x) { return plus_product(sum, line, x); }
    static int64_t row_bytes(int64_t width) { return 4 * width; }
    float result(float sum, const float*, int64_t) const { return sum; }
};

// Numbers of type T.
template <class T>
struct Plain : ByFloats {
    static constexpr bool TAKES_FLOATS = true;
    const T* at;
    int64_t stride;

    explicit Plain(const Weights& w) : at(static_cast<const T*>(w.at)), stride(w.width) {}
    Plain matrix(int64_t index, int64_t rows) const {
        Plain one = *this;
        one.at += index * rows * stride;
        return one;
    }
    Plain row(int64_t output) const { return matrix(output, 1); }
    const void* place(int64_t column) const { return at + column; }
    Floats line(int64_t column, int64_t count) const { return load_some(at + column, count); }
    void make_row(float* x, int64_t width, float* row) const { std::memcpy(row, x, row_bytes(width)); }
};

// e4m3 with a scale for each block: kernels/linear/block_scaled_matmul.py. x is rounded to e4m3 by the block.
struct Fp8 : ByFloats {
    const uint8_t* at;
    int64_t stride;
    const float* scale;
    bool power_of_two;

    explicit Fp8(const Weights& w)
        : at(static_cast<const uint8_t*>(w.at)), stride(w.width), scale(static_cast<const float*>(w.scale)),
          power_of_two(w.power_of_two != 0) {}
    Fp8 matrix(int64_t index, int64_t rows) const {
        Fp8 one = *this;
        one.at += index * rows * stride, one.scale += index * blocks(rows) * blocks(stride);
        return one;
    }
    Fp8 row(int64_t output) const {
        Fp8 one = *this;
        one.at += output * stride, one.scale += output / BLOCK * blocks(stride);
        return one;
    }
    const void* place(int64_t column) const { return at + column; }
    // The exponent and mantissa of a code are those of a float16 that is 256 times smaller, whose highest bit of the
    // exponent is 0; but the greatest code is NaN, where a carry sets that bit.
    Floats line(int64_t column, int64_t count) const {
        Vectors<LANES>::Byte codes{};
        std::memcpy(&codes, at + column, count);
        const Shorts shifted = shorts_of(codes) << 7, halves = shifted ^ ((shifted + 0x80) & 0x4000);
        float16 some[LANES];
        std::memcpy(some, &halves, sizeof some);
        return load(some) * (256.0f * scale[column / BLOCK]);
    }
    static int64_t blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

    // kernels/formats/quantize.py
    void make_row(float* x, int64_t width, float* row) const {
        for (int64_t first = 0; first < width; first += BLOCK) {
            const int64_t count = width - first < BLOCK ? width - first : BLOCK;
            const float largest = largest_of(x + first, count);
            float step = (largest < 1e-4f ? 1e-4f : largest) * (1 / 448.0f);
            if (power_of_two) {
                int exponent;
                step = std::ldexp(1.0f, std::frexp(step, &exponent) > 0.5f ? exponent : exponent - 1);
            }
            for (int64_t i = 0; i < count; i += LANES) {
                const int64_t lanes = count - i < LANES ? count - i : LANES;
                Floats value = load_some(x + first + i, lanes) / step;
                value = value > 448.0f ? Floats{} + 448.0f : value < -448.0f ? Floats{} - 448.0f : value;
                const Ints bits = (Ints)value;
                const Floats normal = (Floats)((bits + 0x7ffff + ((bits >> 20) & 1)) & ~0xfffff);
                const Floats small = (value + 24576.0f) - 24576.0f;  // 1.5 * 2^14: in steps of 2^-9
                store_some(row + first + i, ((value < 0.0f ? -value : value) < 0.015625f ? small : normal) * step, lanes);
            }
        }
    }
};

// int8 with a scale for each output: kernels/grouped/grouped_matmul_int8.py. x is rounded to int8 by the row; sums are
// exact.
struct Int8 {
    typedef int8_t X;
    typedef Ints Sum;
    static constexpr int STEP = 4 * LANES;
    static constexpr bool TAKES_FLOATS = false;
    typedef int8_t Bytes __attribute__((vector_size(STEP)));
    struct End {  // of a row of x
        float scale;
        int32_t total;  // of its codes
    };
    const int8_t* at;
    int64_t stride;
    const float* scale;

    explicit Int8(const Weights& w)
        : at(static_cast<const int8_t*>(w.at)), stride(w.width), scale(static_cast<const float*>(w.scale)) {}
    Int8 matrix(int64_t index, int64_t rows) const {
        Int8 one = *this;
        one.at += index * rows * stride, one.scale += index * rows;
        return one;
    }
    Int8 row(int64_t output) const { return matrix(output, 1); }
    const void* place(int64_t column) const { return at + column; }
    Bytes line(int64_t column, int64_t count) const { return read(at + column, count); }
    static Bytes read(const int8_t* from, int64_t count) {
        Bytes codes{};
        std::memcpy(&codes, from, count);
        return codes;
    }
    static int64_t row_bytes(int64_t width) { return round_up(width, 4) + sizeof(End); }
    float result(int32_t sum, const int8_t* x, int64_t width) const {
        End end;
        std::memcpy(&end, x + round_up(width, 4), sizeof end);
        return (float)(sum - OFFSET * end.total) * end.scale * *scale;
    }

    // kernels/formats/int8.py
    void make_row(float* x, int64_t width, int8_t* row) const {
        End end{step_of(x, width), 0};
        for (int64_t i = 0; i < width; i++) end.total += row[i] = (int8_t)code_of(x[i], end.scale);
        std::memcpy(row + round_up(width, 4), &end, sizeof end);
    }
    static float step_of(const float* x, int64_t width) {
        const float step = largest_of(x, width) / 127.0f;
        return step < 1.17549435e-38f ? 1.17549435e-38f : step;
    }
    static float code_of(float x, float step) {
        const float code = (x / step + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: in steps of 1
        return code > 127.0f ? 127.0f : code > -127.0f ? code : -127.0f;
    }
    static Ints add(Ints sum, Bytes weight, Bytes x) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)(weight ^ (int8_t)-128), (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)(weight ^ (int8_t)-128), (__m256i)x);
#elif defined(__AVX512BW__)
        const auto low = [](Bytes v) { return _mm512_cvtepi8_epi16(_mm512_castsi512_si256((__m512i)v)); };
        const auto high = [](Bytes v) { return _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64((__m512i)v, 1)); };
        return sum + (Ints)_mm512_madd_epi16(low(weight), low(x)) + (Ints)_mm512_madd_epi16(high(weight), high(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        const __m256i w = (__m256i)weight, y = (__m256i)x;
        const auto low = [](__m256i v) { return _mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)); };
        const auto high = [](__m256i v) { return _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1)); };
        return sum + (Ints)_mm256_madd_epi16(low(w), low(y)) + (Ints)_mm256_madd_epi16(high(w), high(y));
#else
        for (int i = 0; i < STEP; i++) sum[i / 4] += (int32_t)weight[i] * x[i];
        return sum;
#endif
    }
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
    static constexpr int32_t OFFSET = 128;  // that is added to each code of the weight: the processor wants one unsigned
#else
    static constexpr int32_t OFFSET = 0;
#endif
};

// INT4 in planes, with scales of type T for groups of a row: kernels/formats/int4.py. With two planes x is rounded to int8
// by the row.
template <class T>
struct Int4 : ByFloats {
    const uint8_t* at;
    int64_t stride;
    const T* scale;
    int shift;  // two to that power is a group
    bool rounds;  // two planes

    explicit Int4(const Weights& w)
        : at(static_cast<const uint8_t*>(w.at)), stride(w.width), scale(static_cast<const T*>(w.scale)),
          shift(w.group == 32 ? 5 : w.group == 64 ? 6 : 7), rounds(w.kind == 6) {}
    Int4 matrix(int64_t index, int64_t rows) const {
        Int4 one = *this;
        one.at += index * rows * stride / 2, one.scale += index * rows * (stride >> shift);
        return one;
    }
    Int4 row(int64_t output) const { return matrix(output, 1); }
    const void* place(int64_t column) const { return at + column / 2; }
    // Nibbles `plane` and, where a vector is wider than a plane, plane + 1 of as many units as there are lanes.
    Floats line(int64_t column, int64_t) const {
        const uint8_t* units = at + column / 32 * 16;
        const int c = (int)(column & 31);
        Ints nibbles;
        if (rounds) {
            Vectors<LANES>::Byte some;
            std::memcpy(&some, units + (c & 15), sizeof some);
            nibbles = widened(some) >> (c / 16 * 4);
        } else {
            constexpr int EACH = LANES < 8 ? LANES : 8;
            uint16_t some[LANES];
            for (int lane = 0; lane < LANES; lane += EACH) std::memcpy(some + lane, units + 2 * (c & 7), 2 * EACH);
            static const int32_t SECOND[16] = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
            Ints places;
            Shorts both;
            std::memcpy(&places, SECOND, sizeof places);
            std::memcpy(&both, some, sizeof both);
            nibbles = widened(both) >> (places + c / 8 * 4);
        }
        return (__builtin_convertvector(nibbles & 15, Floats) - 8.0f) * number(scale[column >> shift]);
    }

    void make_row(float* x, int64_t width, float* row) const {
        const float step = rounds ? Int8::step_of(x, width) : 1.0f;
        for (int64_t i = 0; i < width; i++) row[i] = rounds ? Int8::code_of(x[i], step) * step : x[i];
    }
};

template <class Work>
auto Weights::as_kind(const Work& work) const {
    if (kind == 3) return work(Int8(*this));
    if (kind == 4) return work(Fp8(*this));
    return of_type(type, [&](auto zero) {
        typedef decltype(zero) T;
        return kind == 0 ? work(Plain<T>(*this)) : work(Int4<T>(*this));
    });
}

// Rows `bytes` apart: row r, or with an order row order[r] / shared.
struct Rows {
    const void* at;
    int64_t bytes;
    const int32_t* order = nullptr;
    int64_t shared = 1;

    char* operator()(int64_t row) const {
        const char* first = static_cast<const char*>(at);
        return const_cast<char*>(first) + (order ? order[row] / shared : row) * bytes;
    }
};

// Rows of numbers as a weight takes them: those themselves, or made of them in `scratch`, where there is room for one more.
template <class Weight>
Rows rows_for(const Weight& weight, Numbers x, int64_t rows, int64_t width, int64_t stride, char* scratch) {
    if (x.type == ROUNDED || (Weight::TAKES_FLOATS && x.type == 0)) return {x.at, Weight::row_bytes(stride)};
    const int64_t bytes = Weight::row_bytes(width);
    float* floats = reinterpret_cast<float*>(scratch + rows * bytes);
    for (int64_t row = 0; row < rows; row++) {
        x.copy(row * stride, width, floats);
        weight.make_row(floats, width, reinterpret_cast<typename Weight::X*>(scratch + row * bytes));
    }
    return {scratch, bytes};
}

// out = gate / (1 + exp(-gate)) * up, of `width` numbers each; out may be gate.
template <class T>
inline void silu_mul_row(const T* gate, const T* up, int64_t width, T* out) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = width - i < LANES ? width - i : LANES;
        const Floats open = load_some(gate + i, count);
        store_some(out + i, open * sigmoid_of(open) * load_some(up + i, count), count);
    }
}

// to(row)[output] = weight[output] . from(row) for all rows and the outputs `first` ... `end` - 1, as numbers of `type`;
// of others than floats for at most ROWS_OF_TILE rows.
template <class Weight>
void multiply(const Weight& weight, int64_t width, int64_t first, int64_t end, int64_t rows, const Rows& from,
              const Rows& to, int64_t type);
