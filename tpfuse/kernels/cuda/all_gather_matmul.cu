// All-gather + GEMMs in one persistent kernel: own rows first, while one thread per CTA pushes this rank's rows of A to the
// peers in paced pieces; tiles of a peer's rows wait until those have arrived.
//
// One CTA per multiprocessor, all resident. Warp group 0: warp 0 loads operands, warp 1 pushes. Groups 1, 2: wgmma.
// Needs what gemm.cuh needs, WORLD, MATRICES, ELEMENT (of results; 0: bf16, 1: fp16) and STORED (columns of a tile that leave
// together: a multiple of 64).
//
// Epochs as in matmul_reduce_scatter.cu. A count per block of rows and source tells the owner how many pieces have arrived; the
// last CTA of a call to end sets them to zero, before this rank begins the call after it.

constexpr int PEERS = WORLD - 1;
constexpr int PIECE_ROWS = 64, PIECE_BYTES = PIECE_ROWS * BK_BYTES;

struct Params {
  TensorMap a;               // [first + count, K], this rank's rows
  TensorMap piece;           // the same, in pieces
  TensorMap gathered;        // [PEERS, count, K]: by source
  TensorMap sent[PEERS];     // the same of rank + 1, rank + 2, ..., in pieces
  TensorMap b[MATRICES];     // [N, K] each
  TensorMap out[MATRICES];   // [WORLD, first + count, N]: planes of S rows
  int* peer_counts[PEERS];   // theirs: as counts
  int* peer_begun[PEERS];
  int* counts;               // [PEERS, stride]: source rank + 1, rank + 2, ...; a block of rows each
  int* begun;                // [PEERS]
  int* epoch;                // {of the last call that has ended, CTAs that have ended this one}
  Control* control;
  const uint16_t* bias[MATRICES];  // [N] or null
  Scale a_scale, b_scale[MATRICES];  // with FP8: of [S], this rank's, and [N]
  float* scales;             // [PEERS, scale_stride]: of the peers' rows, where each row has one
  float* peer_scales[PEERS];
  int columns[MATRICES];
  int inner, share;          // K, S
  int first, count, loaded;  // of each rank's rows, those of this launch; of a tile's, those that are loaded
  int rank, whole, across, pause;  // pause: clocks between pieces
  int stride, scale_stride, tag;
  long long* profile;
};

// Units of one rank's rows over all matrices, and where one of them lies.
struct Unit {
  int source;  // -1: this rank; else an index of a peer
  int matrix;
  Place at;
};

INLINE Unit unit_at(const Params& p, int n, int down, int per_rank) {
  Unit t;
  int turn = n / per_rank, rest = n - turn * per_rank;
  // A rank sends to the next one first, so the one before is here first.
  t.source = turn ? PEERS - turn : -1;
  t.matrix = 0;
  for (int m = 0; m < MATRICES - 1; m++) {
    int units = down * ((p.columns[m] + BN - 1) / BN);
    if (t.matrix == m && rest >= units) {
      rest -= units;
      t.matrix = m + 1;
    }
  }
  int columns = 0;
  for (int m = 0; m < MATRICES; m++)
    if (m == t.matrix) columns = (p.columns[m] + BN - 1) / BN;
  t.at = place(rest, down, columns, p.across);
  return t;
}

INLINE int pieces_of(const Params& p, int block) {
  int rows = max(0, min(BM, p.count - block * BM));
  return (rows + PIECE_ROWS - 1) / PIECE_ROWS * ((p.inner + BK - 1) / BK);
}

INLINE void count_piece(int* count) {
  proxy_fence();
  asm volatile("red.release.sys.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

// The slices of a launch, and which of them are this cluster's; of K the steps that are this CTA's.
struct Work {
  int down, per_rank, total, first, at_once;
  Steps steps;

  INLINE explicit Work(const Params& p)
      : down((p.count + BM * STACK - 1) / (BM * STACK)),
        per_rank(0),
        first(blockIdx.x / CLUSTER),
        at_once(gridDim.x / CLUSTER),
        steps((p.inner + BK - 1) / BK) {
    for (int m = 0; m < MATRICES; m++) per_rank += down * ((p.columns[m] + BN - 1) / BN);
    total = slices_of(per_rank * WORLD, p.whole);
  }
};

// The n-th slice of the work: its source's first row in this launch, the first of those that this CTA sums up, and its columns
// of its matrix.
struct Task {
  int source, matrix, tile_row, row, column, columns;

  INLINE Task(const Params& p, const Work& w, int n) {
    Slice s = slice_at(n, p.whole);
    Unit t = unit_at(p, s.unit, w.down, w.per_rank);
    source = t.source;
    matrix = t.matrix;
    tile_row = row_of(t.at);
    row = own_row_of(t.at);
    column = t.at.column * BN + s.first;
    columns = s.columns;
  }
};

// One thread: operands; a peer's rows when they are here. poisoned: results are not numbers any more.
INLINE void load_operands(const Params& p, Stages& stages, const Work& w, int* poisoned) {
  bool dead = load_flag(&p.control->abort);
  long long for_rows = 0;
  for (int n = w.first; n < w.total; n += w.at_once) {
    Task t(p, w, n);
    const TensorMap* b = &p.b[0];
    for (int m = 1; m < MATRICES; m++)
      if (m == t.matrix) b = &p.b[m];
    if (t.source < 0) {
      if (dead) *(volatile int*)poisoned = 1;
      stages.load(&p.a, b, p.first + t.tile_row, t.column, t.columns, w.steps.first, w.steps.end);
      continue;
    }
    int peer = (p.rank + 1 + t.source) % WORLD;
    int block = t.tile_row / BM;
    const int* count = p.counts + t.source * p.stride + block;
    WAITING(for_rows, dead = dead || !wait_for(count, pieces_of(p, block), p.control, p.tag + (peer << 8)));
    if (dead) *(volatile int*)poisoned = 1;
    proxy_fence();
    stages.load(&p.gathered, b, t.tile_row, t.column, t.columns, w.steps.first, w.steps.end, t.source);
  }
  WRITE_DOWN(p.profile, STAGE, stages.waited());
  WRITE_DOWN(p.profile, ROWS, for_rows);
}

// One thread: this rank's rows to every peer, piece by piece.
INLINE void push_rows(const Params& p, uint32_t bounce, uint32_t fetched, int epoch) {
  bool dead = load_flag(&p.control->abort);
  if (blockIdx.x == 0 && !dead)
    for (int i = 0; i < PEERS; i++) store_flag(p.peer_begun[i] + PEERS - 1 - i, epoch);
  int wide = (p.inner + BK - 1) / BK, high = (p.count + PIECE_ROWS - 1) / PIECE_ROWS, turn = 0;
  uint32_t fetched_parity = 0;
  for (int i = 0; i < PEERS && !dead; i++) {
    // Of rank + 1 + i, this rank is source WORLD - 2 - i.
    int source = PEERS - 1 - i, peer = (p.rank + 1 + i) % WORLD;
    int* counts = p.peer_counts[i] + source * p.stride;
    float* scales = FP8 ? p.peer_scales[i] + source * p.scale_stride : nullptr;
    int before = -1, last = -1;  // blocks of the pieces that are still on their way
    dead = !wait_for(p.begun + i, epoch, p.control, p.tag + (peer << 8));
    long long next = clock64();
    for (int n = blockIdx.x; n < wide * high && !dead; n += gridDim.x, turn++) {
      int row = n / wide * PIECE_ROWS, column = n % wide * BK;
      uint32_t buffer = bounce + (turn & 1) * PIECE_BYTES;
      tma_wait_written<1>();
      if (before >= 0) count_piece(counts + before);
      barrier_expect(fetched, PIECE_BYTES);
      tma_load(buffer, &p.piece, fetched, column, p.first + row);
      barrier_wait(fetched, fetched_parity);
      fetched_parity ^= 1;
      // Paced: a burst from all multiprocessors would fill the way to the link, and the operands' loads would queue behind.
      while (clock64() < next) asm volatile("nanosleep.u32 64;");
      next += p.pause;
      tma_store(&p.sent[i], buffer, column, row, source);
      tma_commit();
      // Told of with the piece.
      for (int r = row; FP8 && p.a_scale.each && !column && r < min(row + PIECE_ROWS, p.count); r++)
        *(volatile float*)(scales + r) = p.a_scale.factors[p.first + r];
      before = last;
      last = row / BM;
    }
    tma_wait_written<0>();
    if (before >= 0) count_piece(counts + before);
    if (last >= 0) count_piece(counts + last);
  }
}

// All threads of warp group 0: the CTA has ended the call when its two warps have: nobody pushes, waits or reads a count of it
// any more.
INLINE void end_call(const Params& p, int epoch) {
  asm volatile("barrier.sync 3, 128;" ::: "memory");
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(p.epoch + 1, 1) == gridDim.x - 1) {
      for (int i = 0; i < PEERS; i++)
        for (int j = 0; j * BM < p.count; j++) *(volatile int*)(p.counts + i * p.stride + j) = 0;
      *(volatile int*)(p.epoch + 1) = 0;
      store_flag(p.epoch, epoch);
    }
  }
}

// All threads of a multiplying warp group.
struct Multiplier {
  const Params& p;
  const Work& w;
  const int* poisoned;
  Stages& stages;
  Exchange& exchange;
  int group, thread, lane, upper, first_row;  // upper, first_row: the group's and the warp's, of those that this CTA sums up
  uint32_t tile;

  INLINE Multiplier(const Params& p, const Work& w, uint32_t tile, const int* poisoned, Stages& stages, Exchange& exchange,
                    int group)
      : p(p), w(w), poisoned(poisoned), stages(stages), exchange(exchange), group(group), tile(tile) {
    thread = threadIdx.x & 127;
    lane = threadIdx.x & 31;
    upper = SPLIT == 1 ? (group - 1) * 64 : 0;
    first_row = upper + thread / 32 * 16;
  }

  // A tile's product, scales, bias, and out.
  template <int COLUMNS>
  INLINE void compute(const Task& t, Ring<COLUMNS>& ring) {
    float c[COLUMNS / 2];
    multiply_tile(c, ring, w.steps.count(), group - 1, thread);
    if (SPLIT > 1 && !exchange.sum<COLUMNS>(c, group - 1, thread)) return;
    const uint16_t* bias = p.bias[0];
    const TensorMap* out = &p.out[0];
    int columns = p.columns[0];
    Scale b_scale = p.b_scale[0];
    for (int m = 1; m < MATRICES; m++)
      if (m == t.matrix) {
        bias = p.bias[m];
        out = &p.out[m];
        columns = p.columns[m];
        b_scale = p.b_scale[m];
      }
#if FP8
    Scale a_scale = p.a_scale;
    if (a_scale.each) a_scale.factors = t.source < 0 ? a_scale.factors + p.first : p.scales + t.source * p.scale_stride;
    scale_tile<COLUMNS>(c, a_scale, t.row + first_row + lane / 4, p.count, b_scale, t.column, columns, lane);
#endif
    add_bias<COLUMNS>(c, bias, t.column, columns, true, true, lane);
    if (*(const volatile int*)poisoned) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) c[i] = NOT_A_NUMBER;
    }
    uint32_t words[COLUMNS / 16][4];
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) rounded(words[j], c, j);
    constexpr int PART = COLUMNS < STORED ? COLUMNS : STORED;
    int owner = t.source < 0 ? p.rank : (p.rank + 1 + t.source) % WORLD;
#pragma unroll
    for (int first = 0; first < COLUMNS; first += PART) {
      if (thread == 0) tma_wait_read();
      asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#pragma unroll
      for (int j = 0; j < PART / 16; j++) tile_store(tile_address(tile, first_row, lane, j), words[first / 16 + j]);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
      if (thread == 0 && t.row + upper < p.count) {
        for (int j = 0; j < PART; j += 64)
          tma_store(out, tile + j / 64 * BOX_BYTES + upper * 128, t.column + first + j, p.first + t.row + upper, owner);
        tma_commit();
      }
    }
  }

  INLINE void run() {
    long long begun = clock64();
    int n = w.first;
    for (; n < p.whole; n += w.at_once) compute(Task(p, w, n), stages.wide);
    for (; SLICES > 1 && n < w.total; n += w.at_once) compute(Task(p, w, n), stages.narrow);
    if (thread == 0) tma_wait_written<0>();
    if (threadIdx.x == 128) {
      WRITE_DOWN(p.profile, ALL, clock64() - begun);
      WRITE_DOWN(p.profile, OPERANDS, stages.waited());
    }
  }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(384, 1) tpfuse_all_gather_matmul(const __grid_constant__ Params p) {
  extern __shared__ uint8_t memory[];
  __shared__ alignas(8) uint64_t barriers[STAGE_BARRIERS + 3];
  __shared__ int poisoned;
  uint32_t data = (shared_address(memory) + 1023) & ~1023u, bounce = data + OPERAND_BYTES;
  Stages stages(data, shared_address(barriers), p.loaded);
  uint32_t fetched = shared_address(barriers + STAGE_BARRIERS), tile = bounce + 2 * PIECE_BYTES;
  Exchange exchange(tile + STORED / 64 * BOX_BYTES, fetched + 8);
  int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    stages.init();
    exchange.init();
    barrier_init(fetched, 1);
    poisoned = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  int epoch = after(load_flag(p.epoch));  // by all threads, before any of this CTA ends the call
  __syncthreads();
  cluster_sync();
  Work work(p);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    if (warp == 0 && lane == 0)
      load_operands(p, stages, work, &poisoned);
    else if (warp == 1 && lane == 0)
      push_rows(p, bounce, fetched, epoch);
    end_call(p, epoch);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIER_REGISTERS));
    Multiplier(p, work, tile, &poisoned, stages, exchange, group).run();
  }
  cluster_sync();  // no CTA leaves while another may still signal it
}
