// GEMM + reduce-scatter in one persistent kernel: tiles of the peers' rows are pushed to them in paced pieces while the next
// tiles are computed; own tiles add what the peers have sent, in a fixed order, before they are stored. ALL_ROWS 1: and the
// results are pushed to the peers likewise, so that it is an all-reduce.
//
// One CTA per multiprocessor, all resident. Warp group 0: warp 0 loads operands, warp 1 moves tiles of C, warp 2 (ALL_ROWS)
// copies the peers' results to where they belong. Groups 1, 2: wgmma.
// Needs what gemm.cuh needs, WORLD, PRODUCTS (that are added), ELEMENT (of results; 0: bf16, 1: fp16), ALL_ROWS and WIRE_FP32
// (partial sums travel in fp32, not as ELEMENT).
//
// A call has an epoch, the same on all ranks. Partial sums go to the owner's buffer once the owner has begun the same call:
// what the call before has received there has been read then. A flag per slice of a tile and source tells the owner the epoch
// that has arrived. The same holds for results.

constexpr int PEERS = WORLD - 1, PIECE_ROWS = 32;
// Columns of a box of results, and of partial sums, which are in the same place before them.
constexpr int BOX = 64, SUM_BOX = WIRE_FP32 ? 32 : 64, TILE_BYTES = BN / SUM_BOX * BOX_BYTES;
// What warp 2 copies by, and where: boxes of half as many rows as a tile, in turn.
constexpr int COPY_ROWS = 64, COPY_BYTES = COPY_ROWS * 128;

struct Params {
  TensorMap a[PRODUCTS], b[PRODUCTS];  // [M, K], [N, K], one after the other
  TensorMap out;           // [1 or, with ALL_ROWS, WORLD, first + count, N]: planes of S rows
  TensorMap received;      // [PEERS, count, N]: partial sums, by source
  TensorMap results;       // the same: of the source's rows
  TensorMap copied;        // out, in boxes of COPY_ROWS
  TensorMap sent[PEERS];   // what rank + 1, rank + 2, ... have received, in pieces
  TensorMap given[PEERS];  // their results
  int* peer_flags[PEERS];  // theirs: as flags
  int* peer_begun[PEERS];
  int* flags;              // [PEERS, stride]: source rank + 1, rank + 2, ...; a slice each. The same place in every call
  int* begun;              // [PEERS]: epoch of the call that the source has begun
  int* epoch;              // {of the last call that has ended, CTAs that have ended this one}
  Control* control;
  const uint16_t* bias;    // [N] or null
  Scale a_scale, b_scale;  // with FP8: of [M] and [N]
  int inner[PRODUCTS];              // K of each
  int rows, columns, share;         // M, N, S
  int first, count, loaded;         // of each rank's rows, those of this launch; of a tile's, those that are loaded
  int rank, lead, whole, across, pause;  // lead: units of peers before own ones are mixed in; pause: clocks between pieces
  int stride, results_ahead, tag;  // results_ahead: from flags of partial sums to those of results
  long long* profile;
};

// The n-th unit of work in the order of computing, a unit being the tiles of a cluster: `lead` of the peers', then one of ours
// after each PEERS of theirs, then the rest of ours. Peers take turns within a tile's place, so that no rank is sent to by all
// at once. `lead` is a multiple of PEERS. A unit of ours comes after those of the same number at all peers, so no rank waits for what
// waits for it.
struct Unit {
  int own, peer, number;
};

INLINE Unit unit_at(int n, int units, int lead) {
  int theirs = units * PEERS, index = n - lead;
  if (index < 0) return {0, n % PEERS, n / PEERS};
  int mixed = (theirs - lead) / PEERS;  // rounds of PEERS of theirs and one of ours
  if (index < mixed * WORLD) {
    int round = index / WORLD, turn = index % WORLD;
    if (turn == PEERS) return {1, 0, round};
    int t = lead + round * PEERS + turn;
    return {0, t % PEERS, t / PEERS};
  }
  return {1, 0, n - theirs};
}

INLINE int steps_of(int inner) { return (inner + BK - 1) / BK; }

INLINE int steps_of_all(const Params& p) {
  int steps = 0;
  for (int i = 0; i < PRODUCTS; i++) steps += steps_of(p.inner[i]);
  return steps;
}

// The slices of a launch, and which of them are this cluster's; of K the steps that are this CTA's.
struct Work {
  int down, across, units, total, first, at_once;
  Steps steps;

  // Below the last row there may be a tile of nothing: it is loaded as zeros, and not stored.
  INLINE explicit Work(const Params& p)
      : down((p.count + BM * STACK - 1) / (BM * STACK)),
        across((p.columns + BN - 1) / BN),
        units(down * across),
        total(slices_of(units * WORLD, p.whole)),
        first(blockIdx.x / CLUSTER),
        at_once(gridDim.x / CLUSTER),
        steps(steps_of_all(p)) {}
};

// The n-th slice of the work: of this rank's rows or a peer's; its first row (of the owner's in this launch) and column, the
// first of the rows that this CTA sums up, and its first flag.
struct Task {
  int own, peer, owner, tile_row, row, column, columns, flag;

  INLINE Task(const Params& p, const Work& w, int n) {
    Slice s = slice_at(n, p.whole);
    Unit t = unit_at(s.unit, w.units, p.lead);
    Place at = place(t.number, w.down, w.across, p.across);
    own = t.own;
    peer = t.peer;
    owner = own ? p.rank : (p.rank + 1 + peer) % WORLD;
    tile_row = row_of(at);
    row = own_row_of(at);
    column = at.column * BN + s.first;
    columns = s.columns;
    flag = (t.number * CLUSTER + cluster_place()) * SLICES + s.first / NARROW;
  }
};

// Until all flags of a slice say so.
INLINE bool wait_for_slice(const int* flags, int columns, int epoch, Control* control, int tag) {
  bool arrived = true;
  for (int i = 0; i < columns / NARROW && arrived; i++) arrived = wait_for(flags + i, epoch, control, tag);
  return arrived;
}

// A tile's place in shared memory, and its barriers: it is free; holds a sum; holds a partial sum; and that has been read.
// fetched: what is copied has come. poisoned: sums are not numbers any more.
struct Buffer {
  uint32_t tile, free, filled, arrived, added, fetched;
  int* poisoned;

  INLINE void init() {
    barrier_init(free, 1);
    barrier_init(filled, 2 / SPLIT);
    barrier_init(arrived, 1);
    barrier_init(added, 2 / SPLIT);
    barrier_init(fetched, 1);
    *poisoned = 0;
  }
};

// One thread: operands.
INLINE void load_operands(const Params& p, Stages& stages, const Work& w) {
  for (int n = w.first; n < w.total; n += w.at_once) {
    Task t(p, w, n);
    int row = t.owner * p.share + p.first + t.tile_row;
    for (int i = 0, before = 0; i < PRODUCTS; i++) {
      int steps = steps_of(p.inner[i]);
      stages.load(&p.a[i], &p.b[i], row, t.column, t.columns, max(w.steps.first - before, 0), min(w.steps.end - before, steps));
      before += steps;
    }
  }
  WRITE_DOWN(p.profile, STAGE, stages.waited());
}

// Pushes a tile in such boxes to a peer, piece by piece, and tells it by flags.
template <int COLUMNS>
INLINE void push(const Params& p, const TensorMap* to, int* flags, uint32_t tile, const Task& t, int source, int pause, int epoch) {
  // Paced: a burst from all multiprocessors would fill the way to the link, and the operands' loads would queue behind.
  long long next = clock64();
  for (int r = 0; r < SUM_ROWS && t.row + r < p.count; r += PIECE_ROWS) {
    for (int j = 0; j < t.columns && t.column + j < p.columns; j += COLUMNS) {
      while (clock64() < next) asm volatile("nanosleep.u32 64;");
      next += pause;
      tma_store(to, tile + j / COLUMNS * BOX_BYTES + r * 128, t.column + j, t.row + r, source);
      tma_commit();
      tma_wait_written<1>();
    }
  }
  tma_wait_written<0>();
  proxy_fence();
  for (int i = 0; i < t.columns / NARROW; i++) store_flag(flags + i, epoch);
}

// One thread: partial sums in for own tiles, one peer's after the other's; sums out, to this rank's rows or to the peers.
INLINE void move_tiles(const Params& p, const Work& w, const Buffer& b, int epoch) {
  bool dead = load_flag(&p.control->abort);
  uint32_t begun = 0;  // bit i: by peer i
  long long for_partials = 0, for_results = 0, pushing = 0;
  uint32_t filled_parity = 0, added_parity = 0;
  // Of rank + 1 + i, this rank is source WORLD - 2 - i.
  for (int i = 0; i < PEERS && blockIdx.x == 0 && !dead; i++) store_flag(p.peer_begun[i] + PEERS - 1 - i, epoch);
  for (int n = w.first; n < w.total; n += w.at_once) {
    Task t(p, w, n);
    tma_wait_read();
    if (t.own) {
      for (int i = 0; i < PEERS; i++) {
        if (i) {
          barrier_wait(b.added, added_parity);
          added_parity ^= 1;
        }
        int peer = (p.rank + 1 + i) % WORLD;
        const int* flags = p.flags + i * p.stride + t.flag;
        WAITING(for_partials, dead = dead || !wait_for_slice(flags, t.columns, epoch, p.control, p.tag + (peer << 8)));
        if (dead) {
          *(volatile int*)b.poisoned = 1;
          barrier_arrive(b.arrived);
          continue;
        }
        proxy_fence();
        barrier_expect(b.arrived, t.columns / SUM_BOX * BOX_BYTES);
        for (int j = 0; j < t.columns; j += SUM_BOX)
          tma_load(b.tile + j / SUM_BOX * BOX_BYTES, &p.received, b.arrived, t.column + j, t.row, i);
      }
    } else {
      barrier_arrive(b.free);
    }
    WAITING(for_results, barrier_wait(b.filled, filled_parity));
    filled_parity ^= 1;
    if (t.own) {
      for (int j = 0; j < t.columns; j += BOX)
        tma_store(&p.out, b.tile + j / BOX * BOX_BYTES, t.column + j, p.first + t.row, ALL_ROWS ? p.rank : 0);
      tma_commit();
      if (!ALL_ROWS) continue;
    }
    // As long as the next slice takes; behind the last one, nothing is computed that its pieces could hold up.
    int next = n + w.at_once, pause = next < w.total ? p.pause * slice_at(next, p.whole).columns / t.columns : 0;
    for (int i = t.own ? 0 : t.peer; i < (t.own ? PEERS : t.peer + 1) && !dead; i++) {
      int source = PEERS - 1 - i, peer = (p.rank + 1 + i) % WORLD;
      dead = !(begun >> i & 1) && !wait_for(p.begun + i, epoch, p.control, p.tag + (peer << 8));
      if (dead) break;
      begun |= 1u << i;
      int* flags = p.peer_flags[i] + source * p.stride + t.flag;
      if (t.own)
        WAITING(pushing, push<BOX>(p, &p.given[i], flags + p.results_ahead, b.tile, t, source, pause / PEERS, epoch));
      else
        WAITING(pushing, push<SUM_BOX>(p, &p.sent[i], flags, b.tile, t, source, pause * SUM_BOX / BOX, epoch));
    }
  }
  tma_wait_written<0>();
  WRITE_DOWN(p.profile, PARTIAL, for_partials);
  WRITE_DOWN(p.profile, RESULT, for_results);
  WRITE_DOWN(p.profile, PUSHING, pushing);
  // All have read the epoch before the last one ends, and changes it.
  if (atomicAdd(p.epoch + 1, 1) == gridDim.x - 1) {
    *(volatile int*)(p.epoch + 1) = 0;
    store_flag(p.epoch, epoch);
  }
}

// One thread: the peers' results from where they arrive to their rows of out, as they arrive.
INLINE void collect(const Params& p, const Work& w, const Buffer& b, int epoch) {
  bool dead = load_flag(&p.control->abort), poisoned = false;
  uint32_t buffers = b.tile + TILE_BYTES, parity = 0;
  int turn = 0;
  for (int n = blockIdx.x; n < w.units * CLUSTER * PEERS; n += gridDim.x) {
    int source = n % PEERS, number = n / PEERS, owner = (p.rank + 1 + source) % WORLD;
    Place at = place(number / CLUSTER, w.down, w.across, p.across);
    int row = (at.row * CLUSTER + number % CLUSTER) * SUM_ROWS, column = at.column * BN;
    const int* flags = p.flags + p.results_ahead + source * p.stride + number * SLICES;
    dead = dead || !wait_for_slice(flags, BN, epoch, p.control, p.tag + (owner << 8));
    if (dead && !poisoned) {  // from now on, what is copied is not a number
      poisoned = true;
      tma_wait_read();
      for (int i = 0; i < 2 * COPY_BYTES / 4; i++)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(buffers + 4 * i), "r"(pack(NOT_A_NUMBER, NOT_A_NUMBER)) : "memory");
    }
    proxy_fence();
    for (int r = 0; r < SUM_ROWS && row + r < p.count; r += COPY_ROWS) {
      for (int j = 0; j < BN && column + j < p.columns; j += BOX, turn ^= 1) {
        uint32_t buffer = buffers + turn * COPY_BYTES;
        tma_wait_read<1>();
        if (!dead) {
          barrier_expect(b.fetched, COPY_BYTES);
          tma_load(buffer, &p.results, b.fetched, column + j, row + r, source);
          barrier_wait(b.fetched, parity);
          parity ^= 1;
        }
        tma_store(&p.copied, buffer, column + j, p.first + row + r, owner);
        tma_commit();
      }
    }
  }
  tma_wait_written<0>();
}

// All threads of a multiplying warp group.
struct Multiplier {
  const Params& p;
  const Work& w;
  const Buffer& b;
  Stages& stages;
  Exchange& exchange;
  int group, thread, lane, first_row;  // first_row: the warp's, of those that this CTA sums up
  uint32_t free_parity = 0, arrived_parity = 0;
  long long for_place = 0;

  INLINE Multiplier(const Params& p, const Work& w, const Buffer& b, Stages& stages, Exchange& exchange, int group)
      : p(p), w(w), b(b), stages(stages), exchange(exchange), group(group), thread(threadIdx.x & 127), lane(threadIdx.x & 31) {
    first_row = (SPLIT == 1 ? (group - 1) * 64 : 0) + thread / 32 * 16;
  }

  // A tile's product, with own rows what the peers have sent, and the bias.
  template <int COLUMNS>
  INLINE void compute(const Task& t, Ring<COLUMNS>& ring) {
    float c[COLUMNS / 2];
    multiply_tile(c, ring, w.steps.count(), group - 1, thread);
    if (SPLIT > 1 && !exchange.sum<COLUMNS>(c, group - 1, thread)) return;
    int row = t.owner * p.share + p.first + t.row + first_row + lane / 4;
#if FP8
    scale_tile<COLUMNS>(c, p.a_scale, row, p.rows, p.b_scale, t.column, p.columns, lane);
#endif
    if (t.own) {
      for (int i = 0; i < PEERS; i++) {
        WAITING(for_place, barrier_wait(b.arrived, arrived_parity));
        arrived_parity ^= 1;
        add_tile<COLUMNS, WIRE_FP32>(c, b.tile, first_row, lane);
        if (i < PEERS - 1) {
          asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
          if (thread == 0) barrier_arrive(b.added);
        }
      }
      add_bias<COLUMNS>(c, p.bias, t.column, p.columns, row < p.rows, row + 8 < p.rows, lane);
      if (*(volatile int*)b.poisoned) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) c[i] = NOT_A_NUMBER;
      }
    } else {
      WAITING(for_place, barrier_wait(b.free, free_parity));
      free_parity ^= 1;
    }
    if (t.own)
      put_tile<COLUMNS, 0>(c, b.tile, first_row, lane);
    else
      put_tile<COLUMNS, WIRE_FP32>(c, b.tile, first_row, lane);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
    if (thread == 0) barrier_arrive(b.filled);
  }

  INLINE void run() {
    long long begun = clock64();
    int n = w.first;
    for (; n < p.whole; n += w.at_once) compute(Task(p, w, n), stages.wide);
    for (; SLICES > 1 && n < w.total; n += w.at_once) compute(Task(p, w, n), stages.narrow);
    if (threadIdx.x == 128) {
      WRITE_DOWN(p.profile, ALL, clock64() - begun);
      WRITE_DOWN(p.profile, OPERANDS, stages.waited());
      WRITE_DOWN(p.profile, PLACE, for_place);
    }
  }
};

#if ALL_ROWS
#define KERNEL tpfuse_matmul_all_reduce
#else
#define KERNEL tpfuse_matmul_reduce_scatter
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(384, 1) KERNEL(const __grid_constant__ Params p) {
  extern __shared__ uint8_t memory[];
  __shared__ alignas(8) uint64_t barriers[STAGE_BARRIERS + 7];
  __shared__ int poisoned;
  uint32_t data = (shared_address(memory) + 1023) & ~1023u;
  Stages stages(data, shared_address(barriers), p.loaded);
  uint32_t more = shared_address(barriers + STAGE_BARRIERS);
  Exchange exchange(data + OPERAND_BYTES + TILE_BYTES + (ALL_ROWS ? 2 * COPY_BYTES : 0), more + 40);
  Buffer buffer = {data + OPERAND_BYTES, more, more + 8, more + 16, more + 24, more + 32, &poisoned};
  int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    stages.init();
    buffer.init();
    exchange.init();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  int epoch = after(load_flag(p.epoch));  // by all threads, before any of this CTA ends the call
  __syncthreads();
  cluster_sync();
  Work work(p);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    if (warp == 0 && lane == 0)
      load_operands(p, stages, work);
    else if (warp == 1 && lane == 0)
      move_tiles(p, work, buffer, epoch);
    else if (ALL_ROWS && warp == 2 && lane == 0)
      collect(p, work, buffer, epoch);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIER_REGISTERS));
    Multiplier(p, work, buffer, stages, exchange, group).run();
  }
  cluster_sync();  // no CTA leaves while another may still signal it
}
