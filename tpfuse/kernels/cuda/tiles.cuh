// What becomes of a tile when it has been multiplied, and which tiles there are. Behind gemm.cuh, needs what that does.

// With SPLIT: a warp group's products to the same group of the other CTA, where they are added: so each CTA sums up the rows of
// one of its groups, while the other one goes on. In parts of GIVEN columns, for there is little room.
struct Exchange {
  static constexpr int GIVEN = BN == 128 ? BN : BN / 2, BYTES = SUM_ROWS * GIVEN * 4;
  uint32_t data, given, taken;  // addresses in shared memory: of the room, of its barriers
  uint32_t parity = 0;

  INLINE Exchange(uint32_t data, uint32_t barriers) : data(data), given(barriers), taken(barriers + 8) {}

  INLINE void init() {
    barrier_init(given, 1);
    barrier_init(taken, 1);
  }

  // All threads of a warp group (0 or 1) that has computed c. Whether the sum is this CTA's: then it is in c.
  template <int COLUMNS>
  INLINE bool sum(float* c, int group, int thread) {
    int other = cluster_place() ^ 1;
    bool mine = group == cluster_place();
    uint32_t slot = (mine ? data : address_at(data, other)) + thread * 16, told = address_at(given, other);
#pragma unroll
    for (int first = 0; first < COLUMNS / 2; first += GIVEN / 2, parity ^= 1) {
      if (mine && thread == 0) barrier_expect(given, BYTES);
      barrier_wait(mine ? given : taken, mine ? parity : parity ^ 1);
#pragma unroll
      for (int i = 0; i < GIVEN / 8; i++) {
        float* of = c + first + 4 * i;
        if (mine) {
          float more[4];
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(more[0]), "=f"(more[1]), "=f"(more[2]), "=f"(more[3])
                       : "r"(slot + i * 2048)
                       : "memory");
#pragma unroll
          for (int j = 0; j < 4; j++) of[j] += more[j];
        } else {
          store_at(slot + i * 2048, of, told);
        }
      }
      if (mine) {
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        if (thread == 0) barrier_arrive_at(taken, other);
      }
    }
    return mine;
  }
};

// -- a tile's numbers -------------------------------------------------------------------------------------------------
//
// A thread has rows lane / 4 and that + 8 of its warp's 16, and columns 2 * (lane % 4) and the next of each block of 8: of the
// j-th block c[4 j] and c[4 j + 1] of the upper row, c[4 j + 2] and c[4 j + 3] of the lower one.

// Factors of all, or (each 1) of each row or column.
struct Scale {
  const float* factors;
  int each;

  INLINE float at(int i, int count) const { return *(volatile const float*)(factors + (each ? min(i, count - 1) : 0)); }
};

// row, rows: of the thread's upper row among the factors, and how many there are; column: the tile's first.
template <int COLUMNS>
INLINE void scale_tile(float* c, Scale a, int row, int rows, Scale b, int column, int columns, int lane) {
  float upper = a.at(row, rows), lower = a.at(row + 8, rows);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    int first = column + 8 * j + 2 * (lane & 3);
    float left = b.at(first, columns), right = b.at(first + 1, columns);
    c[4 * j] *= upper * left;
    c[4 * j + 1] *= upper * right;
    c[4 * j + 2] *= lower * left;
    c[4 * j + 3] *= lower * right;
  }
}

// bias [columns] or null. upper, lower: whether the thread's rows get it.
template <int COLUMNS>
INLINE void add_bias(float* c, const uint16_t* bias, int column, int columns, bool upper, bool lower, int lane) {
  if (!bias) return;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    int first = column + 8 * j + 2 * (lane & 3);
    if (first < columns) {
      uint32_t words = *(const uint32_t*)(bias + first);
      float left = low_of(words), right = high_of(words);
      c[4 * j] += upper ? left : 0;
      c[4 * j + 1] += upper ? right : 0;
      c[4 * j + 2] += lower ? left : 0;
      c[4 * j + 3] += lower ? right : 0;
    }
  }
}

// The 16 columns from 16 j, rounded, as tile_store wants them.
INLINE void rounded(uint32_t* words, const float* c, int j) {
#pragma unroll
  for (int k = 0; k < 4; k++) words[k] = pack(c[8 * j + 2 * k], c[8 * j + 2 * k + 1]);
}

// A thread's 16 bytes in a tile: for columns 16 j to 16 j + 15 of its warp's 16 rows. lane: of the warp; first_row: its first row.
INLINE uint32_t tile_address(uint32_t tile, int first_row, int lane, int j) {
  int row = first_row + (lane & 15);
  return tile + (j / 4) * BOX_BYTES + row * 128 + ((((j & 3) * 2 + (lane >> 4)) ^ (row & 7)) << 4);
}

INLINE void tile_load(uint32_t* words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

INLINE void tile_store(uint32_t address, const uint32_t* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// In a tile of fp32: a thread's two neighbours in the j-th block of 8 columns, in this row.
INLINE uint32_t pair_address(uint32_t tile, int row, int lane, int j) {
  return tile + (j / 4) * BOX_BYTES + row * 128 + ((((j & 3) * 2 + (lane >> 1 & 1)) ^ (row & 7)) << 4) + (lane & 1) * 8;
}

INLINE void pair_load(float* pair, uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(address) : "memory");
}

INLINE void pair_store(uint32_t address, const float* pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair[0]), "f"(pair[1]) : "memory");
}

// Adds a thread's part of a tile of sums to c: in fp32, or as ELEMENT.
template <int COLUMNS, int FP32>
INLINE void add_tile(float* c, uint32_t tile, int first_row, int lane) {
  if constexpr (FP32) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {  // upper and lower row in turn
      float pair[2];
      pair_load(pair, pair_address(tile, first_row + lane / 4 + i % 2 * 8, lane, i / 2));
      c[2 * i] += pair[0];
      c[2 * i + 1] += pair[1];
    }
    __syncwarp();  // its place is the warp's own, and may be written next
  } else {
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
      uint32_t words[4];
      tile_load(words, tile_address(tile, first_row, lane, j));
#pragma unroll
      for (int k = 0; k < 4; k++) {
        c[8 * j + 2 * k] += low_of(words[k]);
        c[8 * j + 2 * k + 1] += high_of(words[k]);
      }
    }
  }
}

// Writes it.
template <int COLUMNS, int FP32>
INLINE void put_tile(const float* c, uint32_t tile, int first_row, int lane) {
  if constexpr (FP32) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++)
      pair_store(pair_address(tile, first_row + lane / 4 + i % 2 * 8, lane, i / 2), c + 2 * i);
  } else {
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
      uint32_t words[4];
      rounded(words, c, j);
      tile_store(tile_address(tile, first_row, lane, j), words);
    }
  }
}

// -- tiles ------------------------------------------------------------------------------------------------------------

// What is done at one time: a unit, or a slice of one. The n-th, where units from `whole` on are cut into slices, so that the
// last round of them takes less than the time of a unit.
struct Slice {
  int unit, first, columns;  // first: of the unit's columns
};

INLINE Slice slice_at(int n, int whole) {
  if (n < whole) return {n, 0, BN};
  return {whole + (n - whole) / SLICES, (n - whole) % SLICES * NARROW, NARROW};
}

INLINE int slices_of(int units, int whole) { return whole + (units - whole) * SLICES; }

// Where the n-th unit of a matrix of rows x columns units lies: groups of `across` rows, column by
// column, so that what is computed at one time shares operands in the L2 cache.
struct Place {
  int row, column;
};

// The first row of this CTA's tile, and of the rows that it sums up.
INLINE int row_of(Place at) { return (at.row * STACK + stack_place()) * BM; }
INLINE int own_row_of(Place at) { return (at.row * CLUSTER + cluster_place()) * SUM_ROWS; }

INLINE Place place(int n, int rows, int columns, int across) {
  int group = n / (across * columns), first = group * across, height = min(rows - first, across);
  int rest = n - group * across * columns;
  return {first + rest % height, rest / height};
}
