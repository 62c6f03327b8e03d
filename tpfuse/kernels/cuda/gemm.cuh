// The main loop of a persistent, warp-specialised GEMM on Hopper: one warp loads by TMA, two warp groups multiply by wgmma.
//
// A [M, K] with K contiguous and B [N, K] with K contiguous (B_ROWS 0) or N (B_ROWS 1), 16-bit or (FP8 1) e4m3, then with
// B_ROWS 0; C in fp32 registers, 64 x BN per warp group. Needs BN (128, 192, 256), STAGES, OPERAND_BYTES (of shared memory, for
// all stages), B_ROWS, CLUSTER, SPLIT, FP8.
//
// CLUSTER (1 or 2) CTAs compute tiles one below the other at the same time. Each loads its rows of A, and its part of B for
// all of them. Or, with SPLIT 2, they share a tile: each has half of K, and sums up half of the rows. A unit is the tiles of a
// cluster. What a tile is computed with has a parameter COLUMNS: BN, or NARROW for a slice of it.

constexpr int BM = 128, SUM_ROWS = BM / SPLIT, BK_BYTES = 128, BK = FP8 ? 128 : 64;
constexpr int A_BYTES = BM * BK_BYTES, B_BYTES = BN * BK_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int NARROW = BN == 256 ? 128 : BN, SLICES = BN / NARROW, NARROW_STAGES = OPERAND_BYTES / (A_BYTES + NARROW * BK_BYTES);
constexpr int STAGE_BARRIERS = 2 * (SLICES > 1 ? STAGES + NARROW_STAGES : STAGES);
// A tile of C in shared memory: boxes of 64 columns (32 in fp32), rows of 128 bytes, swizzled as the tensor maps say.
// SUM_ROWS of it: those that this CTA sums up.
constexpr int BOX_BYTES = SUM_ROWS * 128;
constexpr int LOADER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;

// -- a cluster ---------------------------------------------------------------------------------------------------------

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

INLINE int cluster_place() { return CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER; }
INLINE int stack_place() { return STACK == 1 ? 0 : cluster_place(); }

// All threads of all its CTAs.
INLINE void cluster_sync() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// -- the main loop -----------------------------------------------------------------------------------------------------

// A ring of stages, as the loader and the multipliers go through it.
template <int COLUMNS>
struct Ring {
  static constexpr int COUNT = COLUMNS == BN ? STAGES : NARROW_STAGES, BYTES = A_BYTES + COLUMNS * BK_BYTES;
  uint32_t data, full, empty;  // addresses in shared memory: of the first stage, of its barriers
  int stage = 0;
  uint32_t parity = 0;
  long long waited = 0;

  INLINE Ring(uint32_t data, uint32_t barriers) : data(data), full(barriers), empty(barriers + 8 * COUNT) {}

  INLINE void init() {
    for (int i = 0; i < COUNT; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 2 * STACK);
    }
  }

  INLINE void next() {
    if (++stage == COUNT) {
      stage = 0;
      parity ^= 1;
    }
  }

  // One thread: steps of K for one tile, from k to end. rows: of A that are loaded; plane: of A, where it is a buffer that
  // peers write.
  INLINE void load(const TensorMap* a, const TensorMap* b, int rows, int row, int column, int k, int end, int plane) {
    constexpr int BOX = B_ROWS ? 64 : NARROW / STACK, PART = COLUMNS / STACK;  // columns
    column += stack_place() * PART;
    for (; k < end; k++, next()) {
      uint32_t to = data + stage * BYTES, to_b = to + A_BYTES + stack_place() * PART * BK_BYTES;
      uint32_t barrier = full + 8 * stage;
      WAITING(waited, barrier_wait(empty + 8 * stage, parity ^ 1));
      barrier_expect(barrier, rows * BK_BYTES + COLUMNS * BK_BYTES);
      if (plane < 0)
        tma_load(to, a, barrier, k * BK, row);
      else
        tma_load(to, a, barrier, k * BK, row, plane);
      for (int j = 0; j < PART; j += BOX)
        if (B_ROWS)
          tma_load_all(to_b + j * BK_BYTES, b, barrier, column + j, k * BK);
        else
          tma_load_all(to_b + j * BK_BYTES, b, barrier, k * BK, column + j);
    }
  }

  // The same thread: until nothing is in it any more.
  INLINE void drain() {
    for (int i = 0; i < COUNT; i++, next()) WAITING(waited, barrier_wait(empty + 8 * stage, parity ^ 1));
  }

  // All threads of a warp group: the stage that has this barrier is not read any more.
  INLINE static void release(uint32_t barrier, int thread) {
    if (STACK == 1 && thread == 0) barrier_arrive(barrier);
    if (STACK > 1 && thread < STACK) barrier_arrive_at(barrier, thread);
  }
};

// The same shared memory, for tiles, and after the last of them for slices.
struct Stages {
  Ring<BN> wide;
  Ring<NARROW> narrow;
  int rows;  // of A that are loaded for a tile: what more it has in shared memory is rows that there are not
  bool drained = false;

  INLINE Stages(uint32_t data, uint32_t barriers, int rows)
      : wide(data, barriers), narrow(data, barriers + 16 * STAGES), rows(rows) {}

  INLINE void init() {
    wide.init();
    if (SLICES > 1) narrow.init();
  }

  INLINE void load(const TensorMap* a, const TensorMap* b, int row, int column, int columns, int k, int end, int plane = -1) {
    if (columns == BN) {
      wide.load(a, b, rows, row, column, k, end, plane);
    } else {
      if (!drained) wide.drain();
      drained = true;
      narrow.load(a, b, rows, row, column, k, end, plane);
    }
  }

  INLINE long long waited() const { return wide.waited + narrow.waited; }
};

// Of an operand in rows of 128 swizzled bytes, 8 rows after 8 rows: K along the rows; or, across them, boxes of 64 columns.
INLINE uint64_t matrix(uint32_t address, uint32_t box_bytes = 16) {
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(box_bytes >> 4) << 16 | (64ull << 32) | (1ull << 62);
}

// B from its k-th 32 bytes of K.
INLINE uint64_t matrix_b(uint32_t address, int k) {
#if B_ROWS
  return matrix(address + k * 16 * 128, 64 * BK_BYTES);
#else
  return matrix(address + k * 32);
#endif
}

#if FP8
#define WGMMA_KIND "k32.f32.e4m3.e4m3"
#define WGMMA_LAST "add, 1, 1; }"
#elif B_ROWS
#define WGMMA_KIND "k16." WGMMA_TYPES
#define WGMMA_LAST "add, 1, 1, 0, 1; }"
#else
#define WGMMA_KIND "k16." WGMMA_TYPES
#define WGMMA_LAST "add, 1, 1, 0, 0; }"
#endif

#define C8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define C32(i) C8(i), C8(i + 8), C8(i + 16), C8(i + 24)
#define TEXT_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TEXT_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TEXT_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(n, products, a, b, add) \
  "{ .reg .pred add; setp.ne.b32 add, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n WGMMA_KIND " {" products "}, " a ", " b ", " WGMMA_LAST

// c = a @ b (add 0) or c += a @ b (add 1), over 32 bytes of K.
template <int COLUMNS>
INLINE void multiply(float* c, uint64_t a, uint64_t b, int add) {
  if constexpr (COLUMNS == 256)
    asm volatile(WGMMA("256", TEXT_0 TEXT_32 TEXT_64 TEXT_96, "%128", "%129", "%130")
                 : C32(0), C32(32), C32(64), C32(96)
                 : "l"(a), "l"(b), "r"(add));
  else if constexpr (COLUMNS == 192)
    asm volatile(WGMMA("192", TEXT_0 TEXT_32 TEXT_64, "%96", "%97", "%98")
                 : C32(0), C32(32), C32(64)
                 : "l"(a), "l"(b), "r"(add));
  else
    asm volatile(WGMMA("128", TEXT_0 TEXT_32, "%64", "%65", "%66") : C32(0), C32(32) : "l"(a), "l"(b), "r"(add));
}

// With LEFT 0 the products are used behind this line, and not before it.
template <int COLUMNS, int LEFT>
INLINE void wait_for_products(float* c) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
  if (LEFT == 0) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(c[i])::"memory");
  }
}

// All threads of one of the two multiplying warp groups: c of one tile. group: 0 or 1, thread: within it.
template <int COLUMNS>
INLINE void multiply_tile(float* c, Ring<COLUMNS>& ring, int steps, int group, int thread) {
  uint32_t before = 0;
#if FP8
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) c[i] = 0;
#endif
  for (int k = 0; k < steps; k++, ring.next()) {
    uint32_t first = ring.data + ring.stage * ring.BYTES, a = first + group * 64 * BK_BYTES, b = first + A_BYTES;
    uint32_t empty = ring.empty + 8 * ring.stage;
    WAITING(ring.waited, barrier_wait(ring.full + 8 * ring.stage, ring.parity));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#if FP8
    // The tensor cores keep 14 bits of a sum of such products: every step's is added to another, in fp32.
    // While one warp group adds, the other's products are formed.
#pragma unroll
    for (int slice = 0; slice < COLUMNS / NARROW; slice++) {
      float part[NARROW / 2];
#pragma unroll
      for (int i = 0; i < BK_BYTES / 32; i++)
        multiply<NARROW>(part, matrix(a + 32 * i), matrix_b(b + slice * NARROW * BK_BYTES, i), i);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      wait_for_products<NARROW, 0>(part);
      if (slice == COLUMNS / NARROW - 1) ring.release(empty, thread);
#pragma unroll
      for (int i = 0; i < NARROW / 2; i++) c[slice * NARROW / 2 + i] += part[i];
      if (slice < COLUMNS / NARROW - 1) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
#else
#pragma unroll
    for (int i = 0; i < BK_BYTES / 32; i++) multiply<COLUMNS>(c, matrix(a + 32 * i), matrix_b(b, i), (k | i) != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (k) {  // the step before has been read now
      wait_for_products<COLUMNS, 1>(c);
      ring.release(before, thread);
    }
    before = empty;
#endif
  }
#if !FP8
  wait_for_products<COLUMNS, 0>(c);
  ring.release(before, thread);
#endif
}

// The steps of K that are this CTA's.
struct Steps {
  int first, end;

  INLINE explicit Steps(int all)
      : first(SPLIT == 1 ? 0 : cluster_place() * all / SPLIT), end(SPLIT == 1 ? all : (cluster_place() + 1) * all / SPLIT) {}

  INLINE int count() const { return end - first; }
};
