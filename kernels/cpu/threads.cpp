// The threads of the CPU kernels. They are made when they are first needed and end with the process.
//
// A barrier at which every thread has to arrive makes an operation as slow as the thread that the system lets run last;
// most operations of a decode step are shorter than that. Here a thread that comes late finds no seat, and goes back to
// wait. It does so awake for a moment, as the next operation of a step follows soon.

#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace {

constexpr std::chrono::microseconds AWAKE{200};  // longer than what lies between most operations of a step

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

struct Pool {
    std::mutex mutex;
    std::condition_variable wake, left;
    std::atomic<bool> busy{false};  // work is going on
    std::atomic<int> seats{0};  // that are free; changed under the mutex, like all that follows
    std::atomic<int> inside{0};
    int threads = 0, sleeping = 0, taken = 0;
    void (*work)(void*, int) = nullptr;
    void* data = nullptr;
};

// Never destroyed: its threads may outlive whatever destroys it.
alignas(Pool) char memory[sizeof(Pool)];
Pool& pool = *reinterpret_cast<Pool*>(memory);

// As long as `holds`, for a moment, without sleeping.
template <class Condition>
void stay_awake(const Condition& holds) {
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    while (holds()) {
        for (int i = 0; i < 32 && holds(); i++) pause();
        if (std::chrono::steady_clock::now() > end) return;
    }
}

void serve() {
    for (;;) {
        stay_awake([] { return pool.seats.load(std::memory_order_relaxed) == 0; });
        std::unique_lock<std::mutex> lock(pool.mutex);
        pool.sleeping++;
        pool.wake.wait(lock, [] { return pool.seats > 0; });
        pool.sleeping--;
        pool.seats--;
        pool.inside++;
        const int thread = ++pool.taken;
        lock.unlock();
        pool.work(pool.data, thread);  // neither changes while a thread is inside
        lock.lock();
        if (--pool.inside == 0) pool.left.notify_all();
    }
}

// Up to `wanted` threads, which leave the process's signals to others.
void make_threads(int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (; pool.threads < wanted; pool.threads++) std::thread(serve).detach();
    } catch (const std::exception&) {
        // No threads or no memory left: those that there are do it all.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void make_pool() { new (memory) Pool; }

// A child process has none of the threads, and the mutex in the state that its holder left.
const bool made = [] {
    make_pool();
    pthread_atfork(nullptr, nullptr, make_pool);
    return true;
}();

}  // namespace

void run_on_threads(int threads, void (*work)(void*, int), void* data) {
    if (threads <= 1 || pool.busy.exchange(true)) {  // a call of another thread has the pool
        work(data, 0);
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(pool.mutex);
        if (pool.threads < threads - 1) make_threads(threads - 1);
        pool.work = work;
        pool.data = data;
        pool.taken = 0;
        pool.seats = threads - 1;
        for (int i = 1; i < threads && i <= pool.sleeping; i++) pool.wake.notify_one();
    }
    work(data, 0);
    std::unique_lock<std::mutex> lock(pool.mutex);
    pool.seats = 0;
    lock.unlock();
    stay_awake([] { return pool.inside.load(std::memory_order_acquire) > 0; });
    lock.lock();
    pool.left.wait(lock, [] { return pool.inside == 0; });
    pool.busy = false;
}
