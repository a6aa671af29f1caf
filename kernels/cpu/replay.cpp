#include "replay.h"

// Runs calls that lie one after another: address of a kernel's `_words`, number of arguments, arguments. Returns 0, or
// the number of the first call, from 1, that returned something else; those after it do not run.
extern "C" int64_t dsa_replay(const int64_t* call, int64_t calls) {
    for (int64_t i = 1; i <= calls; i++) {
        if (((int64_t (*)(const int64_t*))call[0])(call + 2) != 0) return i;
        call += 2 + call[1];
    }
    return 0;
}
