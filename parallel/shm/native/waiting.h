// One rank's view of a shared segment, and how it waits for the others.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

// Told to Python by number.
enum Problem : uint64_t { NO_PROBLEM, LATE, GONE, MISMATCH, FORKED };

// Who found it, and whom it is about.
struct Failure {
  uint64_t problem = NO_PROBLEM;
  uint64_t by = 0;
  uint64_t about = 0;

  uint64_t packed() const { return problem | by << 8 | about << 16; }
  static Failure unpacked(uint64_t word) { return {word & 255, word >> 8 & 255, word >> 16 & 255}; }
};

// Thrown: the group is of no more use.
struct Failed {};

// Before a core is offered to another process: a few microseconds.
constexpr int LOOKS = 64;
// About what it takes to fall asleep and be woken.
constexpr int64_t LOOKOUT_NANOSECONDS = 60'000;
// How often a sleeper looks whether the others are still there.
constexpr int64_t LOOK_NANOSECONDS = 50'000'000;

inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the others are other processes.
inline void sleep_while(std::atomic<uint32_t>* word, uint32_t value, int64_t nanoseconds) {
  const timespec most = {nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &most, nullptr, 0);
}

inline void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, MOST_RANKS, nullptr, nullptr, 0);
}

struct Group {
  char* base = nullptr;
  int rank = 0;
  int size = 0;
  int file = -1;
  pid_t process = 0;
  size_t slot_bytes = 0;
  int64_t timeout_nanoseconds = 0;
  uint32_t round = FIRST_ROUND;
  Failure failure;
  // Of a mismatch.
  Call theirs{};

  Header& header() { return *reinterpret_cast<Header*>(base); }
  Member& member(int of) { return reinterpret_cast<Member*>(base + PAGE)[of]; }
  // What a rank holds out to the others in this round.
  char* slot(int of) {
    return base + slots_offset(size) + (2 * of + round % 2) * slot_bytes;
  }
  Call& call(int of) { return member(of).calls[round % 2]; }
  uint64_t* sent(int of) { return member(of).sent[round % 2]; }
  // The i-th of the others, each rank beginning after itself: not all at the same one at once.
  int other(int i) const { return (rank + 1 + i) % size; }

  [[noreturn]] void fail(Problem problem, int about) {
    failure = {problem, static_cast<uint64_t>(rank), static_cast<uint64_t>(about)};
    uint64_t none = 0;
    header().failure.compare_exchange_strong(none, failure.packed());
    for (int i = 0; i < size; i++) wake_all(&member(i).posted);
    throw Failed();
  }

  void check_usable() {
    if (process != getpid()) {
      // A child of fork: the mapping stays with the parent.
      failure = {FORKED, static_cast<uint64_t>(rank), static_cast<uint64_t>(rank)};
      throw Failed();
    }
    if (failure.problem) throw Failed();
    take_over_failure();
  }

  void take_over_failure() {
    const uint64_t word = header().failure.load();
    if (!word) return;
    failure = Failure::unpacked(word);
    throw Failed();
  }

  void post(const Call& own) {
    Member& me = member(rank);
    me.calls[round % 2] = own;
    me.posted.store(round);
    if (me.sleepers.load()) wake_all(&me.posted);
  }

  // Until that rank has posted this round, and calls the same.
  void await(int of, const Call& own) {
    if (!has_posted(of) && !look_out(of)) sleep_until_posted(of);
    if (is_same(call(of), own)) return;
    theirs = call(of);
    fail(MISMATCH, of);
  }

  void await_all(const Call& own) {
    for (int i = 0; i < size - 1; i++) await(other(i), own);
  }

 private:
  bool has_reached(uint32_t posted) const { return static_cast<int32_t>(posted - round) >= 0; }
  bool has_posted(int of) {
    return has_reached(member(of).posted.load(std::memory_order_acquire));
  }

  // The other may need this very core, which is therefore offered again and again: with two ranks a
  // core, a message of 1 KiB takes 20 to 40 us so, and 500 us where 10,000 looks come before.
  bool look_out(int of) {
    const int64_t until = now() + LOOKOUT_NANOSECONDS;
    do {
      for (int i = 0; i < LOOKS; i++) {
        if (has_posted(of)) return true;
        relax();
      }
      sched_yield();
    } while (now() < until);
    return has_posted(of);
  }

  void sleep_until_posted(int of) {
    const int64_t deadline = now() + timeout_nanoseconds;
    Member& other = member(of);
    other.sleepers.fetch_add(1);
    for (;;) {
      const uint32_t posted = other.posted.load();
      if (has_reached(posted)) break;
      take_over_failure();
      const int64_t left = deadline - now();
      if (left <= 0) fail(LATE, of);
      sleep_while(&other.posted, posted, left < LOOK_NANOSECONDS ? left : LOOK_NANOSECONDS);
      if (!has_posted(of)) check_alive();
    }
    other.sleepers.fetch_sub(1);
  }

  // Each rank holds a lock on one byte of the file, which the kernel gives back when it ends.
  bool is_there(int of) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = of;
    lock.l_len = 1;
    return fcntl(file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }

  // Any of those who are missing: the one that is waited for may itself wait for a dead one. Looked
  // at in this order, as one may post and then end.
  void check_alive() {
    for (int i = 0; i < size - 1; i++) {
      const int of = other(i);
      if (!is_there(of) && !has_posted(of)) fail(GONE, of);
    }
  }
};
