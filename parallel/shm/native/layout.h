// What lies in the memory that the ranks of a group share.
//
//   | Header | Member of each rank | slots: 2 of rank 0, 2 of rank 1, ... |
//
// A collective goes by rounds, which all ranks of the group count alike. In round n a rank
//
//   1. fills its slot n % 2,
//   2. writes what it calls into calls[n % 2], then stores n in `posted`,
//   3. waits until `posted` of each other rank has reached n, and reads what it needs from them.
//
// Why this is enough:
// - The store of `posted` releases and the load that sees it acquires: whoever sees n sees the slot
//   and the call of round n whole.
// - A slot is filled again in round n + 2. Its rank has then seen every other rank at n + 1, and a
//   rank posts n + 1 only when it has read all it needs of round n; by the same release and acquire
//   these reads come before the new writes. So nobody reads what is being overwritten, without any
//   count of readers. Stores past the caches (copying.h) are fenced before the post, and come after
//   that acquire as other stores do: x86 lets no store pass an earlier load.
// - Seen from a rank in round n, another's `posted` is n - 1, n or n + 1, never more: so 32 bits,
//   which is what a futex compares, tell by their difference where it is, past any overflow too.
// - A rank that goes to sleep counts itself in `sleepers`, then looks at `posted` again; one that
//   posts looks at `sleepers` after its store. All four are sequentially consistent, so one of the
//   two sees the other; and the kernel does not let sleep whoever comes with an outdated `posted`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>

constexpr uint64_t MAGIC = 0x316d68735f656f6dull;  // "moe_shm1"
constexpr int MOST_RANKS = 64;
// What rounds are counted from: so that an overflow is met at once, and not after weeks.
constexpr uint32_t FIRST_ROUND = 0u - 32;
// Two lines: processors fetch them in pairs.
constexpr size_t LINES = 128;
constexpr size_t PAGE = 4096;

// What all ranks must call alike.
struct Call {
  uint32_t operation;
  uint32_t number;  // type of the numbers that are added
  uint64_t bytes;
  uint64_t rounds;  // of all_to_all alone, whose ranks do not know each other's
};

inline bool is_same(const Call& a, const Call& b) {
  return a.operation == b.operation && a.number == b.number && a.bytes == b.bytes;
}

struct Header {
  uint64_t magic;
  uint64_t token;  // drawn for this segment: a file that was found by a number may be another one
  uint64_t total_bytes;
  uint64_t slot_bytes;
  uint32_t size;
  // 0, or the first failure, see waiting.h: nobody waits for the others after it.
  alignas(LINES) std::atomic<uint64_t> failure;
};

struct Member {
  alignas(LINES) std::atomic<uint32_t> posted;
  alignas(LINES) std::atomic<uint32_t> sleepers;
  alignas(LINES) Call calls[2];
  alignas(LINES) uint64_t sent[2][MOST_RANKS];  // bytes for each rank, of all_to_all alone
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");
static_assert(sizeof(Header) <= PAGE, "members begin on the second page");

inline size_t slots_offset(int size) {
  return (PAGE + size * sizeof(Member) + PAGE - 1) / PAGE * PAGE;
}

inline size_t segment_bytes(int size, size_t slot_bytes) {
  return slots_offset(size) + 2 * size * slot_bytes;
}
