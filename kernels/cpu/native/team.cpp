// The threads of parallel.h.
//
// Unlike an OpenMP team's, a thread that is not there when work begins is not waited for: where the
// system gives its core to another process, the others do all the work. Between two pieces of work
// threads look out for a tenth of a millisecond, then they sleep.
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "parallel.h"

namespace {

constexpr int64_t LOOKOUT_NANOSECONDS = 100'000;
constexpr int MOST_THREADS = 1024;

struct Team {
  pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER;
  // Written while the work is closed and nobody runs it.
  void (*body)(void*) = nullptr;
  void* data = nullptr;
  int wanted = 0;
  std::atomic<bool> open{false};
  std::atomic<int> running{0};
  // Grows with each piece of work; sleepers wait for it to change.
  std::atomic<uint32_t> number{0};
  std::atomic<int> sleepers{0};
  int started = 0;
  pid_t process = 0;
};
Team team;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void futex(int operation, uint32_t value) {
  syscall(SYS_futex, &team.number, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Run the open work, if there is any. The caller closes it first and then looks at `running`, a
// thread counts itself first and then looks at `open`: one of the two sees the other.
void join_work(int index) {
  team.running.fetch_add(1);
  if (team.open.load() && index < team.wanted) team.body(team.data);
  team.running.fetch_sub(1);
}

void await_change(uint32_t seen) {
  const int64_t until = now() + LOOKOUT_NANOSECONDS;
  do {
    for (int i = 0; i < 64; i++) {
      if (team.number.load(std::memory_order_acquire) != seen) return;
      __builtin_ia32_pause();
    }
  } while (now() < until);
  team.sleepers.fetch_add(1);
  while (team.number.load() == seen) futex(FUTEX_WAIT, seen);
  team.sleepers.fetch_sub(1);
}

void* work(void* argument) {
  const int index = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  uint32_t seen = 0;
  for (;;) {
    await_change(seen);
    seen = team.number.load();
    join_work(index);
  }
  return nullptr;
}

// Threads do not outlive a fork; a child starts its own.
void start_threads(int count) {
  if (team.process != getpid()) {
    team.process = getpid();
    team.started = 0;
    team.sleepers = 0;
  }
  while (team.started < count && team.started < MOST_THREADS) {
    pthread_t thread;
    // From 1: the caller is number 0.
    void* index = reinterpret_cast<void*>(static_cast<intptr_t>(team.started + 1));
    if (pthread_create(&thread, nullptr, work, index)) return;
    pthread_detach(thread);
    team.started++;
  }
}

}  // namespace

void run_team(void (*body)(void*), void* data, int num_threads) {
  // Another thread's work has the team: this one does its own alone.
  if (pthread_mutex_trylock(&team.one_caller)) return body(data);
  start_threads(num_threads - 1);
  team.body = body;
  team.data = data;
  team.wanted = num_threads;
  team.open.store(true);
  team.number.fetch_add(1);
  // All: some of those that wake may not be wanted.
  if (team.sleepers.load()) futex(FUTEX_WAKE, MOST_THREADS);
  body(data);
  team.open.store(false);
  while (team.running.load()) __builtin_ia32_pause();
  pthread_mutex_unlock(&team.one_caller);
}
