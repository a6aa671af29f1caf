// Kernels whose arguments lie in memory, 8 bytes each, so that calls which were recorded run again one after another.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

template <class T>
T of_word(int64_t word) {
    if constexpr (std::is_same_v<T, float>) {
        float value;
        std::memcpy(&value, &word, sizeof value);
        return value;
    } else {
        return (T)word;
    }
}

template <class Result, class... Arguments, size_t... at>
int64_t run_words(Result (*kernel)(Arguments...), const int64_t* words, std::index_sequence<at...>) {
    if constexpr (std::is_void_v<Result>) {
        kernel(of_word<Arguments>(words[at])...);
        return 0;
    } else {
        return kernel(of_word<Arguments>(words[at])...);
    }
}

template <class Result, class... Arguments>
int64_t run_words(Result (*kernel)(Arguments...), const int64_t* words) {
    return run_words(kernel, words, std::index_sequence_for<Arguments...>{});
}

#define REPLAYED(name) \
    extern "C" int64_t name##_words(const int64_t* words) { return run_words(name, words); }
