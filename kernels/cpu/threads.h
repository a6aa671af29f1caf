// Threads that stay, for work that is divided into tiles.
#pragma once

// Runs work(data, 0) here and, beside it, work(data, 1) ... work(data, threads - 1) on as many other threads as are free
// in time: none of these is waited for that has not begun when the caller's part has ended. So the caller's must do what
// the others do not, and all must be able to begin at any time. Work must not throw.
void run_on_threads(int threads, void (*work)(void* data, int thread), void* data);
