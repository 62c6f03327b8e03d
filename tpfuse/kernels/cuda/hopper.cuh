// Hopper's instructions by name, and what our kernels share: waiting for a peer with a deadline. Compiled by NVRTC: no headers.

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long size_t;

#define INLINE __device__ __forceinline__
// CTAs of a cluster whose tiles lie one below the other; SPLIT of them share a tile, each with a part of K.
#define STACK (CLUSTER / SPLIT)

struct alignas(128) TensorMap {
  uint8_t opaque[128];
};

// In device memory: the abort flag of the group's arena, how long to wait, and where in pinned host memory to say so.
struct Control {
  int abort;
  int unused;
  uint64_t deadline_ns;
  int* record;
};

// With PROFILE, what a thread waits for is counted in clocks, and written down at the end: profile is [CTAs, 8].
#ifdef PROFILE
#define WAITING(clocks, ...) \
  do { \
    long long begun_at = clock64(); \
    __VA_ARGS__; \
    clocks += clock64() - begun_at; \
  } while (0)
#define WRITE_DOWN(profile, what, clocks) profile[8 * blockIdx.x + what] = clocks
#else
#define WAITING(clocks, ...) __VA_ARGS__
#define WRITE_DOWN(profile, what, clocks)
#endif
// By the first multiplier: all, for operands, for a tile's place or the partial sum in it. By the loader: for a stage that is
// free, for a peer's rows. By the mover: for a peer's partial sum, for a tile's sum, while pushing.
enum { ALL, OPERANDS, PLACE, STAGE, ROWS, PARTIAL, RESULT, PUSHING };

// -- shared memory -----------------------------------------------------------------------------------------------------

INLINE uint32_t shared_address(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

INLINE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

INLINE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

INLINE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same place in the shared memory of a CTA of the cluster.
INLINE uint32_t address_at(uint32_t address, int cta) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}

INLINE void barrier_arrive_at(uint32_t barrier, int cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_at(barrier, cta)) : "memory");
}

INLINE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// 16 bytes to the shared memory of a CTA of the cluster, whose barrier is told.
INLINE void store_at(uint32_t to, const float* from, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(barrier)
               : "memory");
}

INLINE void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// -- tensor memory accelerator -----------------------------------------------------------------------------------------

INLINE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// To the same place in the shared memory of every CTA of the stack, each of whose barriers is told.
INLINE void tma_load_all(uint32_t to, const TensorMap* map, uint32_t barrier, int column, int row) {
#if STACK == 1
  tma_load(to, map, barrier, column, row);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], "
      "[%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((uint16_t)((1 << STACK) - 1))
      : "memory");
#endif
}

INLINE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int column, int row, int plane) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(plane)
      : "memory");
}

INLINE void tma_store(const TensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}

INLINE void tma_store(const TensorMap* map, uint32_t from, int column, int row, int plane) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row), "r"(plane)
               : "memory");
}

INLINE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most LEFT groups are not written yet. (Tests compile it with SLOW_WIRE, up to so many ns.)
template <int LEFT>
INLINE void tma_wait_written() {
#ifdef SLOW_WIRE
  asm volatile("nanosleep.u32 %0;" ::"r"((uint32_t)(clock64() * 2654435761u) % SLOW_WIRE));
#endif
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Until the shared memory of all groups but at most LEFT has been read.
template <int LEFT = 0>
INLINE void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// -- between ranks -----------------------------------------------------------------------------------------------------

INLINE int load_flag(const int* flag) {
  int value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

INLINE void store_flag(int* flag, int value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

INLINE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Whether a peer's flag has reached the epoch, which may wrap: it is never far ahead.
INLINE bool has_reached(const int* flag, int epoch) { return (uint32_t)load_flag(flag) - (uint32_t)epoch < 1u << 16; }

INLINE int after(int epoch) { return (int)((uint32_t)epoch + 1); }

// Until then. False: the arena is dead, now or before. (Tests compile it with NO_WAIT, to see what goes wrong.)
INLINE bool wait_for(const int* flag, int epoch, Control* control, int tag) {
#ifdef NO_WAIT
  return true;
#endif
  uint64_t start = 0;
  for (uint32_t turns = 0; !has_reached(flag, epoch);) {
    if (++turns & 1023) continue;
    if (load_flag(&control->abort)) return false;
    uint64_t now = now_ns();
    if (!start) start = now;
    if (now - start < *(volatile uint64_t*)&control->deadline_ns) continue;
    int* record = control->record;
    record[1] = tag;
    record[2] = epoch;
    __threadfence_system();
    *(volatile int*)record = 1;
    store_flag(&control->abort, 1);
    return false;
  }
  return true;
}

// -- numbers -----------------------------------------------------------------------------------------------------------

#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// Two fp32 rounded to a word of ELEMENT, and back.
#if ELEMENT == 0  // bf16
#define WGMMA_TYPES "f32.bf16.bf16"
INLINE uint32_t pack(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
INLINE float low_of(uint32_t word) { return __uint_as_float(word << 16); }
INLINE float high_of(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
#else  // fp16
#define WGMMA_TYPES "f32.f16.f16"
INLINE uint32_t pack(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
INLINE float low_of(uint32_t word) {
  float value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(word));
  return value;
}
INLINE float high_of(uint32_t word) {
  float value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(value) : "r"(word));
  return value;
}
#endif
