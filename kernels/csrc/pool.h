// A small thread pool for loops of microseconds.
//
// The caller works too, items are handed out by one counter, and whoever has not joined when the
// items run out is not waited for: a worker that the system has descheduled costs nothing.
// Workers spin for some hundred microseconds after a job, because the next one usually follows
// within them, then sleep.
//
// The pool does not decide how work is divided, and results must not depend on who does an item.
#pragma once

#include <stdint.h>

namespace sw {

using Task = void (*)(void* arg, int64_t item, int thread);

int pool_num_threads();
void pool_set_num_threads(int num_threads);  // including the caller; at least 1
void pool_set_spin(int iterations);

// Calls task(arg, i, thread) once for each i in [0, num_items), thread in [0, num_threads).
// One call at a time: the exported operations hold a lock.
void pool_run(int64_t num_items, Task task, void* arg);

template <typename F>
inline void parallel_for(int64_t num_items, const F& body) {
  pool_run(
      num_items,
      [](void* arg, int64_t item, int thread) { (*static_cast<const F*>(arg))(item, thread); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace sw
