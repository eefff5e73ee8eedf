// The forward pass of one item: rows of one key-value head against a range of keys.

constexpr int MAX_PANELS = 512 / (NV * W);

HEADWISE_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows that go through the register tiles together.
struct Tile {
  int rows, shape;  // shape: rows of the register tile, the rest is filled up
  Row* row;
  float *q, *o, *classes;
  int64_t low_any, high_any, low_all, high_all;  // keys that some row, and that every row, may see by position
  bool started;                                  // o holds something
};

struct Worker {
  const Call& c;
  const Plan& plan;
  int64_t b, g, ldv, ldo, ldq, ldc, lds;
  Row* rows;
  Tile* tiles;
  float *q, *one_q, *o, *classes, *keys, *values, *marks, *s;
  uint32_t *bits, *real;
  int n_rows = 0, n_tiles = 0;
  // Panels of the current tile and key block that some row sees.
  int count = 0, index[MAX_PANELS];
  bool exact[MAX_PANELS];
  bool half = false;  // of the last panel only the first vector is seen
  const float* packed_values = nullptr;  // null: read v as it lies

  Worker(const Call& call, const Plan& its_plan) : c(call), plan(its_plan) {}
};

static int tile_shape(int rows, bool direct) {
  if (direct) return rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
  return rows > 8 || MR <= rows ? MR : rows > 4 && MR > 4 ? (MR < 8 ? MR : 8) : rows > 2 ? 4 : rows;
}

struct Sizes {
  int64_t rows, padded, tiles;
  size_t rows_at, tiles_at, q_at, one_q_at, o_at, classes_at, keys_at, values_at, marks_at, s_at, bits_at, real_at, total;
};

static Sizes sizes(const Call& c, const Plan& plan) {
  Sizes z;
  z.rows = plan.max_rows;
  z.padded = round_up(z.rows, MR) + MR;
  z.tiles = z.rows;  // direct tiles may hold one row
  size_t at = 0;
  auto take = [&at](size_t bytes) {
    size_t here = at;
    at += (bytes + 127) / 64 * 64;
    return here;
  };
  const int64_t dq = plan.direct ? round_up(c.Dk, W) : c.Dk;
  const int64_t panels = plan.key_block / PANEL;
  z.rows_at = take(z.padded * sizeof(Row));
  z.tiles_at = take(z.tiles * sizeof(Tile));
  z.q_at = take((z.padded * dq + W) * 4);
  z.one_q_at = take(round_up(c.Dk, W) * 4);
  z.o_at = take(z.padded * round_up(c.Dv, W) * 4);
  z.classes_at = take(z.padded * round_up(c.n_classes, W) * 4);
  z.keys_at = take(plan.direct ? 0 : plan.key_block * c.Dk * 4 + 64);
  z.values_at = take(plan.pack_v ? plan.key_block * round_up(c.Dv, W) * 4 : 0);
  z.marks_at = take(c.classes ? plan.key_block * round_up(c.n_classes, W) * 4 : 0);
  z.s_at = take(MR * plan.key_block * 4);
  z.bits_at = take(MR * panels * 4);
  z.real_at = take(panels * 4);
  z.total = at;
  return z;
}

static size_t forward_scratch(const Call& c, const Plan& plan) { return sizes(c, plan).total + 64; }

HEADWISE_INLINE void row_range(const Call& c, Row& row, int64_t k0, int64_t k1) {
  const int64_t position = row.query + c.offset;
  row.low = c.window ? most(position - c.window + 1, k0) : k0;
  row.high = c.causal ? least(position + 1, k1) : c.window ? least(position + c.window, k1) : k1;
  if (row.high < row.low) row.high = row.low;
}

template <class T>
static void pack_tile(Worker& w, const Tile& t) {
  const Call& c = w.c;
  const T* src[MR];
  for (int r = 0; r < t.rows; ++r)
    src[r] = (const T*)c.q.data + w.b * c.q.batch + t.row[r].head * c.q.head + t.row[r].query * c.q.row;
  const float scale = c.scale * kLog2e;
  if (w.plan.direct) {
    for (int r = 0; r < t.rows; ++r) pack_row(t.q + r * w.ldq, src[r], c.Dk, scale);
    return;
  }
  for (int r = 0; r < t.shape; r += W) {
    const int n = t.rows - r < 0 ? 0 : t.rows - r < W ? t.rows - r : W;
    turn(t.q + r, t.shape, src + r, n, c.Dk, scale);
  }
}

static void pack_tile_any(Worker& w, const Tile& t) {
  if (w.c.type == Type::f32) pack_tile<float>(w, t);
  else if (w.c.type == Type::bf16) pack_tile<bf16>(w, t);
  else pack_tile<f16>(w, t);
}

// The rows of an item and their tiles, queries packed.
static void set_rows(Worker& w, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  int n = 0;
  for (int32_t at = w.plan.group_start[w.g]; at < w.plan.group_start[w.g + 1]; ++at)
    for (int64_t i = q0; i < q1; ++i) {
      Row& row = w.rows[n++];
      row = Row{kHidden, 0.0f, 0.0f, 0.0f, -1, 0, w.plan.heads[at], 0, i, 0, 0};
      row_range(c, row, k0, k1);
    }
  w.n_rows = n;
  w.n_tiles = 0;
  float* q = w.q;
  for (int start = 0; start < n;) {
    Tile& t = w.tiles[w.n_tiles++];
    t.shape = tile_shape(n - start, w.plan.direct);
    t.rows = n - start < t.shape ? n - start : t.shape;
    t.row = w.rows + start;
    t.q = q;
    t.o = w.o + start * w.ldo;
    t.classes = w.classes + start * w.ldc;
    t.started = false;
    t.low_any = t.low_all = t.row[0].low;
    t.high_any = t.high_all = t.row[0].high;
    for (int r = 1; r < t.rows; ++r) {
      t.low_any = least(t.low_any, t.row[r].low);
      t.low_all = most(t.low_all, t.row[r].low);
      t.high_any = most(t.high_any, t.row[r].high);
      t.high_all = least(t.high_all, t.row[r].high);
    }
    q += t.shape * w.ldq;
    pack_tile_any(w, t);
    start += t.rows;
  }
}

// Lists the panels of [k0, k1) that the tile sees, with each row's bits where not all is visible.
static void list_panels(Worker& w, const Tile& t, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  w.count = 0;
  w.half = false;
  const int64_t a = most(t.low_any, k0), e = least(t.high_any, k1);
  if (a >= e) return;
  const bool plain = !c.mask.data && !c.bias[0].data;
  int whole = 0;  // panels that every row sees
  for (int64_t p = (a - k0) / PANEL; p * PANEL < e - k0; ++p) {
    const int64_t start = k0 + p * PANEL;
    const uint32_t real = c.padding ? w.real[p] : ALL;
    if (plain && real == ALL && start >= t.low_all && start + PANEL <= t.high_all) {
      ++whole;
      w.exact[w.count] = true;
      w.index[w.count++] = (int)p;
      continue;
    }
    uint32_t any = 0, all = ALL;
    uint32_t* bits = w.bits + w.count * MR;
    for (int r = 0; r < t.rows; ++r) {
      bits[r] = visible_bits(c, t.row[r], w.b, start, real);
      t.row[r].visible += __builtin_popcount(bits[r]);
      any |= bits[r];
      all &= bits[r];
    }
    if (!any) continue;
    w.exact[w.count] = all == ALL;
    w.index[w.count++] = (int)p;
  }
  for (int r = 0; r < t.rows; ++r) t.row[r].visible += whole * PANEL;
  w.half = w.count && k0 + (int64_t)w.index[w.count - 1] * PANEL + W >= e;
}

// The end of the run of neighbouring panels that starts at i.
HEADWISE_INLINE int run_end(const Worker& w, int i) {
  int e = i + 1;
  while (e < w.count && w.index[e] == w.index[e - 1] + 1) ++e;
  return e;
}

template <class T>
static void direct_scores(Worker& w, const Tile& t, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  const T* k = (const T*)c.k.data + w.b * c.k.batch + w.g * c.k.head;
  for (int i = 0, e; i < w.count; i = e) {
    e = run_end(w, i);
    const int64_t start = k0 + (int64_t)w.index[i] * PANEL;
    const int64_t n = least((int64_t)(e - i) * PANEL, k1 - start);
    float* s = w.s + (int64_t)i * PANEL;
    const T* from = k + start * c.k.row;
    const T* next = (const T*)c.v.data + w.b * c.v.batch + w.g * c.v.head + start * c.v.row;
    switch (t.shape) {
      case 1: scores_direct<1>(t.q, w.ldq, from, c.k.row, n, c.Dk, s, w.lds, next, c.v.row); break;
      case 2: scores_direct<2>(t.q, w.ldq, from, c.k.row, n, c.Dk, s, w.lds, next, c.v.row); break;
      default: scores_direct<4>(t.q, w.ldq, from, c.k.row, n, c.Dk, s, w.lds, next, c.v.row);
    }
  }
}

template <int R>
static void packed_scores(Worker& w, const Tile& t) {
  const int64_t whole = w.count - w.half, panel = PANEL * w.c.Dk;
  for (int64_t i = 0; i < whole; ++i)
    scores_tile<R, NV>(t.q, w.keys + w.index[i] * panel, w.c.Dk, w.s + i * PANEL, w.lds);
  if (w.half) scores_tile<R, 1>(t.q, w.keys + w.index[whole] * panel, w.c.Dk, w.s + whole * PANEL, w.lds);
}

static void make_scores(Worker& w, const Tile& t, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  if (w.plan.direct) {
    if (c.type == Type::f32) direct_scores<float>(w, t, k0, k1);
    else if (c.type == Type::bf16) direct_scores<bf16>(w, t, k0, k1);
    else direct_scores<f16>(w, t, k0, k1);
  } else {
    if (t.shape == MR) packed_scores<MR>(w, t);
    else if (t.shape == 1) packed_scores<1>(w, t);
    else if (t.shape == 2) packed_scores<2>(w, t);
    else if (t.shape == 4) packed_scores<4>(w, t);
    else packed_scores<8>(w, t);
  }
  const bool bent = bends(c);
  for (int i = 0; i < w.count; ++i) {
    if (w.exact[i] && !bent) continue;
    const int64_t start = k0 + (int64_t)w.index[i] * PANEL;
    for (int r = 0; r < t.rows; ++r) {
      float* s = w.s + r * w.lds + (int64_t)i * PANEL;
      if (bent) bend_scores(c, t.row[r], w.b, start, s);
      if (!w.exact[i]) hide(s, w.bits[i * MR + r]);
    }
  }
}

template <bool STATS, bool DISTANCE>
static void weigh_rows(Worker& w, const Tile& t, int64_t k0, float* alpha) {
  auto key_of = [&w, k0](int64_t column) { return k0 + (int64_t)w.index[column / PANEL] * PANEL + column % PANEL; };
  const int64_t n = (int64_t)w.count * PANEL - (w.half ? PANEL - W : 0);
  const bool straight = w.index[w.count - 1] - w.index[0] == w.count - 1;
  for (int r = 0; r < t.rows; ++r)
    alpha[r] = softmax_row<STATS, DISTANCE>(w.s + r * w.lds, n, t.row[r],
                                            t.row[r].query + w.c.offset, key_of, straight);
}

static void weigh(Worker& w, const Tile& t, int64_t k0, float* alpha) {
  for (int r = t.rows; r < t.shape; ++r) alpha[r] = 1.0f;
  if (w.c.distance) weigh_rows<true, true>(w, t, k0, alpha);
  else if (w.c.statistics) weigh_rows<true, false>(w, t, k0, alpha);
  else weigh_rows<false, false>(w, t, k0, alpha);
}

template <bool FAR, class T>
static void add_values_of(const Worker& w, int shape, const float* p, const T* v, int64_t ldv, int64_t n,
                                   int64_t width, float* o, int64_t ldo, const float* alpha) {
  if (shape == MR) values_rows<MR, NV, FAR>(p, w.lds, v, ldv, n, width, o, ldo, alpha);
  else if (shape == 1) values_rows<1, DV, FAR>(p, w.lds, v, ldv, n, width, o, ldo, alpha);
  else if (shape == 2) values_rows<2, DV, FAR>(p, w.lds, v, ldv, n, width, o, ldo, alpha);
  else if (shape == 4) values_rows<4, DV, FAR>(p, w.lds, v, ldv, n, width, o, ldo, alpha);
  else values_rows<8, NV, FAR>(p, w.lds, v, ldv, n, width, o, ldo, alpha);
}

// Weights times values for `n` keys from `key`, in steps that keep v near when it is read as it lies.
template <class T>
static void add_values(const Worker& w, const Tile& t, const float* p, int64_t key, int64_t n, const float* alpha) {
  const Call& c = w.c;
  static const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const T* v = (const T*)c.v.data + w.b * c.v.batch + w.g * c.v.head + key * c.v.row;
  if (!w.plan.direct) {
    add_values_of<false>(w, t.shape, p, v, c.v.row, n, c.Dv, t.o, w.ldo, alpha);
    return;
  }
  constexpr int64_t STEP = 32;
  for (int64_t at = 0; at < n; at += STEP) {
    const int64_t m = least(STEP, n - at);
    add_values_of<true>(w, t.shape, p + at, v + at * c.v.row, c.v.row, m, c.Dv, t.o, w.ldo, at ? ones : alpha);
  }
}

static void add_run(const Worker& w, const Tile& t, const float* p, int64_t key, int64_t local, int64_t n,
                    const float* alpha) {
  const Call& c = w.c;
  if (w.packed_values)
    add_values_of<false>(w, t.shape, p, w.packed_values + local * w.ldv, w.ldv, n, w.ldv, t.o, w.ldo, alpha);
  else if (c.type == Type::f32) add_values<float>(w, t, p, key, n, alpha);
  else if (c.type == Type::bf16) add_values<bf16>(w, t, p, key, n, alpha);
  else add_values<f16>(w, t, p, key, n, alpha);
  if (c.classes) add_values_of<false>(w, t.shape, p, w.marks + local * w.ldc, w.ldc, n, w.ldc, t.classes, w.ldc, alpha);
}

// One tile against the keys [k0, k1) of a block.
static void tile_block(Worker& w, Tile& t, int64_t k0, int64_t k1) {
  static const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  list_panels(w, t, k0, k1);
  if (!w.count) return;
  make_scores(w, t, k0, k1);
  float alpha[16];
  weigh(w, t, k0, alpha);
  const int64_t stop = least(k1, t.high_any);
  for (int i = 0, e; i < w.count; i = e) {
    e = run_end(w, i);
    const int64_t local = (int64_t)w.index[i] * PANEL;
    const int64_t n = least((int64_t)(e - i) * PANEL, stop - k0 - local);
    add_run(w, t, w.s + (int64_t)i * PANEL, k0 + local, local, n, i ? ones : t.started ? alpha : nullptr);
    t.started = true;
  }
}

template <class T>
static void pack_block(Worker& w, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  if (!w.plan.direct)
    pack_keys(w.keys, (const T*)c.k.data + w.b * c.k.batch + w.g * c.k.head + k0 * c.k.row, c.k.row, k1 - k0, c.Dk);
  if (w.packed_values)
    pack_values(w.values, w.ldv, (const T*)c.v.data + w.b * c.v.batch + w.g * c.v.head + k0 * c.v.row, c.v.row,
                k1 - k0, c.Dv, c.padding ? w.real : nullptr);
}

static void mark_classes(Worker& w, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  const uint8_t* of = c.classes + w.b * c.classes_batch;
  for (int64_t key = k0; key < k1; ++key) {
    float* mark = w.marks + (key - k0) * w.ldc;
    for (int64_t j = 0; j < w.ldc; ++j) mark[j] = j == of[key] && j < c.n_classes ? 1.0f : 0.0f;
  }
}

// Padding bits and packed copies of the keys [k0, k1). Returns false when all of them are padding.
static bool set_block(Worker& w, int64_t k0, int64_t k1) {
  const Call& c = w.c;
  if (c.padding) {
    const uint8_t* real = c.padding + w.b * c.padding_batch;
    uint32_t any = 0;
    for (int64_t k = k0, p = 0; k < k1; k += PANEL, ++p) any |= w.real[p] = some_byte_bits(real + k, k1 - k);
    if (!any) return false;
  }
  if (c.type == Type::f32) pack_block<float>(w, k0, k1);
  else if (c.type == Type::bf16) pack_block<bf16>(w, k0, k1);
  else pack_block<f16>(w, k0, k1);
  if (c.classes) mark_classes(w, k0, k1);
  return true;
}

static void all_blocks(Worker& w, int64_t k0, int64_t k1) {
  int64_t low = k1, high = k0;
  for (int i = 0; i < w.n_tiles; ++i) {
    low = least(low, w.tiles[i].low_any);
    high = most(high, w.tiles[i].high_any);
  }
  low = most(k0, low / w.plan.key_block * w.plan.key_block);
  for (int64_t k = low; k < high; k += w.plan.key_block) {
    const int64_t e = least(k + w.plan.key_block, least(k1, round_up(high, PANEL)));
    if (!set_block(w, k, e)) continue;
    for (int i = 0; i < w.n_tiles; ++i) tile_block(w, w.tiles[i], k, e);
  }
}

static Worker make_worker(const Call& c, const Plan& plan, char* scratch) {
  Worker w(c, plan);
  const Sizes z = sizes(c, plan);
  char* base = scratch;
  w.ldv = w.ldo = round_up(c.Dv, W);
  w.ldq = plan.direct ? round_up(c.Dk, W) : c.Dk;
  w.ldc = round_up(c.n_classes, W);
  w.lds = plan.key_block;
  w.rows = (Row*)(base + z.rows_at);
  w.tiles = (Tile*)(base + z.tiles_at);
  w.q = (float*)(base + z.q_at);
  w.one_q = (float*)(base + z.one_q_at);
  w.o = (float*)(base + z.o_at);
  w.classes = (float*)(base + z.classes_at);
  w.keys = (float*)(base + z.keys_at);
  w.values = (float*)(base + z.values_at);
  w.marks = (float*)(base + z.marks_at);
  w.s = (float*)(base + z.s_at);
  w.bits = (uint32_t*)(base + z.bits_at);
  w.real = (uint32_t*)(base + z.real_at);
  w.packed_values = plan.pack_v ? w.values : nullptr;
  return w;
}

