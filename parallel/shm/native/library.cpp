// What Python calls. 0: done; else a failure, which moe_serve_shm_failure describes.
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <new>

#include "collectives.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class Work>
int run(Group* group, Work work) {
  try {
    group->check_usable();
    work(*group);
    return 0;
  } catch (const Failed&) {
    return 1;
  }
}

void write_header(char* base, int size, size_t slot_bytes, uint64_t token) {
  for (int i = 0; i < size; i++) reinterpret_cast<Member*>(base + PAGE)[i].posted = FIRST_ROUND;
  Header* header = reinterpret_cast<Header*>(base);
  header->token = token;
  header->total_bytes = segment_bytes(size, slot_bytes);
  header->slot_bytes = slot_bytes;
  header->size = size;
  header->magic = MAGIC;
}

// A file that is shorter than it says would kill us by SIGBUS.
const char* find_fault(const Header& header, int size, size_t slot_bytes, uint64_t token) {
  if (header.magic != MAGIC) return "is no segment of this version";
  if (header.token != token) return "is another group's segment";
  if (header.size != static_cast<uint32_t>(size) || header.slot_bytes != slot_bytes ||
      header.total_bytes != segment_bytes(size, slot_bytes)) {
    return "has another size";
  }
  return nullptr;
}

}  // namespace

EXPORT uint64_t moe_serve_shm_bytes(int size, uint64_t slot_bytes) {
  return segment_bytes(size, slot_bytes);
}

// Maps the file, of moe_serve_shm_bytes; rank 0 makes it a segment, before the others come. Null:
// `fault`, a text of at most 100 characters, says why.
EXPORT Group* moe_serve_shm_open(
    int file, int rank, int size, uint64_t slot_bytes, uint64_t token,
    int64_t timeout_nanoseconds, char* fault) {
  const size_t bytes = segment_bytes(size, slot_bytes);
  struct stat status = {};
  if (fstat(file, &status) || static_cast<size_t>(status.st_size) != bytes) {
    snprintf(fault, 100, "the file has another size");
    return nullptr;
  }
  const int protection = PROT_READ | PROT_WRITE;
  void* base = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_POPULATE, file, 0);
  if (base == MAP_FAILED) {
    snprintf(fault, 100, "mmap fails with error %d", errno);
    return nullptr;
  }
  // A child of fork has nothing to do with it.
  madvise(base, bytes, MADV_DONTFORK);
  if (rank == 0) write_header(static_cast<char*>(base), size, slot_bytes, token);
  const char* found = find_fault(*static_cast<Header*>(base), size, slot_bytes, token);
  if (found) {
    munmap(base, bytes);
    snprintf(fault, 100, "the file %s", found);
    return nullptr;
  }
  Group* group = new Group();
  group->base = static_cast<char*>(base);
  group->rank = rank, group->size = size, group->file = file;
  group->process = getpid();
  group->slot_bytes = slot_bytes;
  group->timeout_nanoseconds = timeout_nanoseconds;
  return group;
}

// The file is closed by whoever opened it.
EXPORT void moe_serve_shm_close(Group* group) {
  if (group->process == getpid()) {
    munmap(group->base, segment_bytes(group->size, group->slot_bytes));
  }
  delete group;
}

// [problem, found by, about, and of a mismatch their operation, number, bytes]
EXPORT void moe_serve_shm_failure(const Group* group, uint64_t* words) {
  const Failure& failure = group->failure;
  const Call& theirs = group->theirs;
  const uint64_t all[] = {failure.problem,  failure.by,    failure.about,
                          theirs.operation, theirs.number, theirs.bytes};
  std::copy_n(all, 6, words);
}

EXPORT int moe_serve_shm_all_gather(Group* group, char* out, const char* x, uint64_t bytes) {
  return run(group, [&](Group& g) {
    char* outs[MOST_RANKS];
    for (int i = 0; i < g.size; i++) outs[i] = out + i * bytes;
    gather(g, ALL_GATHER, outs, x, bytes);
  });
}

EXPORT int moe_serve_shm_gather(
    Group* group, char* const* outs, const char* x, uint64_t bytes) {
  return run(group, [&](Group& g) { gather(g, GATHER, outs, x, bytes); });
}

EXPORT int moe_serve_shm_all_to_all(
    Group* group, char* out, const char* x, const uint64_t* received, const uint64_t* sent) {
  return run(group, [&](Group& g) {
    Exchange exchange = {out, x, received, sent, {}, {}};
    all_to_all(g, exchange);
  });
}

EXPORT int moe_serve_shm_reduce_scatter(
    Group* group, uint32_t number, char* out, const char* x, uint64_t bytes) {
  return run(group, [&](Group& g) { reduce_scatter(g, number, out, x, bytes); });
}

EXPORT int moe_serve_shm_all_reduce(Group* group, uint32_t number, char* x, uint64_t bytes) {
  return run(group, [&](Group& g) { all_reduce(g, number, x, bytes); });
}

// Parts of `count` numbers; for tests of the rounding.
EXPORT void moe_serve_shm_add(
    uint32_t number, int is_plain, void* out, const void* const* parts, int num_parts,
    uint64_t count) {
  if (is_plain) return sums::add_plain(number, out, parts, num_parts, count);
  add_in_order(number, out, parts, num_parts, count);
}
