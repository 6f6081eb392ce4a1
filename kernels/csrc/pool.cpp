// See pool.h. The gate is one 64-bit word, so joining and closing cannot race:
//
//     [ job number : 32 ][ open : 1 ][ workers inside : 31 ]
#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sw {
namespace {

constexpr uint64_t kOpen = 1ull << 31;
constexpr uint64_t kInside = kOpen - 1;
constexpr uint64_t kJob = 1ull << 32;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

struct Pool {
  alignas(64) std::atomic<uint64_t> gate{0};
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint32_t> signal{0};
  std::atomic<uint32_t> sleepers{0};
  alignas(64) std::atomic<uint32_t> left{0};
  std::atomic<bool> stop{false};
  std::atomic<int> alive{0};
  Task task = nullptr;
  void* arg = nullptr;
  int64_t num_items = 0;
  int num_workers = 0;
  pid_t owner = 0;
};

// About 200 us: what lies between two operations of a step, seen from a cold interpreter.
std::atomic<int> g_spin{4000};
int g_threads = 1;
Pool* g_pool = nullptr;

void drain(Pool& pool, int thread) {
  const int64_t end = pool.num_items;
  for (;;) {
    const int64_t item = pool.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= end) return;
    pool.task(pool.arg, item, thread);
  }
}

bool try_join(Pool& pool, uint64_t seen_job) {
  uint64_t gate = pool.gate.load(std::memory_order_acquire);
  while ((gate & kOpen) && gate / kJob != seen_job) {
    if (pool.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void leave(Pool& pool) {
  const uint64_t before = pool.gate.fetch_sub(1, std::memory_order_acq_rel);
  if (!(before & kOpen) && (before & kInside) == 1) {
    pool.left.fetch_add(1, std::memory_order_release);
    pool.left.notify_one();
  }
}

void sleep_until_signal(Pool& pool, uint32_t seen) {
  pool.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (pool.signal.load(std::memory_order_seq_cst) == seen) pool.signal.wait(seen);
  pool.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void worker(Pool* pool, int thread) {
  uint64_t last_job = 0;
  for (;;) {
    // The signal is read before `stop`: stop_pool sets them in the other order.
    const uint32_t seen = pool->signal.load(std::memory_order_seq_cst);
    if (pool->stop.load(std::memory_order_seq_cst)) break;
    bool joined = false;
    const int spin = g_spin.load(std::memory_order_relaxed);
    for (int i = 0; i <= spin && !joined; ++i) {
      joined = try_join(*pool, last_job);
      if (!joined) relax();
    }
    if (!joined) {
      sleep_until_signal(*pool, seen);
      continue;
    }
    last_job = pool->gate.load(std::memory_order_relaxed) / kJob;
    drain(*pool, thread);
    leave(*pool);
  }
  pool->alive.fetch_sub(1, std::memory_order_release);
}

void stop_pool(Pool* pool) {
  pool->stop.store(true, std::memory_order_seq_cst);
  pool->signal.fetch_add(1, std::memory_order_seq_cst);
  pool->signal.notify_all();
  while (pool->alive.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  delete pool;
}

Pool* start_pool(int num_workers) {
  Pool* pool = new Pool();
  pool->owner = getpid();
  pool->num_workers = num_workers;
  pool->alive.store(num_workers);
  for (int i = 0; i < num_workers; ++i) std::thread(worker, pool, i + 1).detach();
  return pool;
}

// The pool of this process. After a fork the parent's threads are gone: its pool is abandoned.
Pool* current_pool() {
  const int workers = g_threads - 1;
  if (g_pool != nullptr && g_pool->owner != getpid()) g_pool = nullptr;
  if (g_pool != nullptr && g_pool->num_workers != workers) {
    stop_pool(g_pool);
    g_pool = nullptr;
  }
  if (g_pool == nullptr && workers > 0) g_pool = start_pool(workers);
  return g_pool;
}

void wait_for_workers(Pool& pool) {
  const int spin = g_spin.load(std::memory_order_relaxed);
  for (int i = 0; i < spin; ++i) {
    if ((pool.gate.load(std::memory_order_acquire) & kInside) == 0) return;
    relax();
  }
  for (;;) {
    const uint32_t seen = pool.left.load(std::memory_order_acquire);
    if ((pool.gate.load(std::memory_order_acquire) & kInside) == 0) return;
    pool.left.wait(seen);
  }
}

}  // namespace

int pool_num_threads() { return g_threads; }

void pool_set_num_threads(int num_threads) { g_threads = num_threads < 1 ? 1 : num_threads; }

void pool_set_spin(int iterations) { g_spin.store(iterations < 0 ? 0 : iterations); }

void pool_run(int64_t num_items, Task task, void* arg) {
  Pool* pool = num_items > 1 ? current_pool() : nullptr;
  if (pool == nullptr) {
    for (int64_t i = 0; i < num_items; ++i) task(arg, i, 0);
    return;
  }
  pool->task = task;
  pool->arg = arg;
  pool->num_items = num_items;
  pool->next.store(0, std::memory_order_relaxed);
  const uint64_t job = pool->gate.load(std::memory_order_relaxed) / kJob + 1;
  pool->gate.store((job & 0xffffffffull) * kJob | kOpen, std::memory_order_seq_cst);
  pool->signal.fetch_add(1, std::memory_order_seq_cst);
  if (pool->sleepers.load(std::memory_order_seq_cst) > 0) pool->signal.notify_all();
  drain(*pool, 0);
  pool->gate.fetch_and(~kOpen, std::memory_order_acq_rel);
  wait_for_workers(*pool);
}

}  // namespace sw
