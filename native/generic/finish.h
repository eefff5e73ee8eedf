// What happens to a row when all its keys are done: partial results, the careful second look, outputs.

HEADWISE_INLINE float exp2_one(float x) {
  float lanes[W];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}

// A row alone, along its visible keys only, so that nothing hidden is even multiplied by zero. For the rare rows
// whose output or sums are not finite although their weights are.
static void careful_row(Worker& from, Row& row, float* o, float* classes) {
  const Call& c = from.c;
  Plan plan = from.plan;
  plan.direct = true;
  plan.pack_v = false;
  Worker w(c, plan);
  w.b = from.b;
  w.g = from.g;
  w.ldo = from.ldo;
  w.ldq = round_up(c.Dk, W);
  w.ldc = from.ldc;
  w.lds = from.lds;
  w.q = from.one_q;
  w.s = from.s;
  w.bits = from.bits;
  w.real = from.real;
  w.marks = from.marks;
  w.packed_values = nullptr;
  Row fresh = {kHidden, 0.0f, 0.0f, 0.0f, -1, 0, row.head, 1, row.query, row.low, row.high};
  row = fresh;
  Tile t = {1, 1, &row, w.q, o, classes, row.low, row.high, row.low, row.high, false};
  pack_tile_any(w, t);
  constexpr float kLowest = -1.0e38f;  // stands for a visible score of -inf
  for (int64_t k0 = row.low / plan.key_block * plan.key_block; k0 < row.high; k0 += plan.key_block) {
    const int64_t k1 = least(k0 + plan.key_block, c.K);
    if (!set_block(w, k0, k1)) continue;
    list_panels(w, t, k0, k1);
    if (!w.count) continue;
    make_scores(w, t, k0, k1);
    for (int i = 0; i < w.count; ++i) {
      if (w.exact[i]) w.bits[i * MR] = ALL;
      float* s = w.s + (int64_t)i * PANEL;
      for (int j = 0; j < NV; ++j) store(s + j * W, max(set1(kLowest), load(s + j * W)));
      hide(s, w.bits[i * MR]);
    }
    float alpha[16];
    weigh(w, t, k0, alpha);
    bool scaled = false;
    for (int i = 0; i < w.count; ++i) {
      const int64_t local = (int64_t)w.index[i] * PANEL;
      for (uint32_t bits = w.bits[i * MR]; bits;) {
        const int low = __builtin_ctz(bits);
        const uint32_t gone = ~(bits >> low);
        const int n = gone ? __builtin_ctz(gone) : 32 - low;
        static const float one = 1.0f;
        add_run(w, t, w.s + (int64_t)i * PANEL + low, k0 + local + low, local + low, n,
                scaled ? &one : t.started ? alpha : nullptr);
        t.started = scaled = true;
        bits = low + n >= 32 ? 0 : bits & ~range_bits(0, low + n, 0);
      }
    }
  }
  if (row.visible && row.max <= kLowest) row.sum = __builtin_nanf("");
}

// Writes a row; false where something in it is not finite.
template <class T>
HEADWISE_INLINE bool write_output(T* z, const float* o, int64_t width, float factor, bool empty) {
  const F f = set1(factor), none = set1(0.0f);
  uint32_t wrong = 0;
  int64_t d = 0;
  for (; d + W <= width; d += W) {
    const F x = empty ? none : mul(load(o + d), f);
    wrong |= ~finite_bits(x) & (uint32_t)((1ull << W) - 1);
    store_first(z + d, x, W);
  }
  if (d < width) {
    const int n = (int)(width - d);
    const F x = empty ? none : mul(load(o + d), f);
    wrong |= ~finite_bits(x) & ((1u << n) - 1u);
    store_first(z + d, x, n);
  }
  return wrong == 0;
}

static bool write_row(const Worker& w, const Row& row, const float* o, float factor) {
  const Call& c = w.c;
  const bool empty = row.visible == 0;
  const int64_t at = w.b * c.z_stride.batch + row.head * c.z_stride.head + row.query * c.z_stride.row;
  if (c.type == Type::f32) return write_output((float*)c.z + at, o, c.Dv, factor, empty);
  if (c.type == Type::bf16) return write_output((bf16*)c.z + at, o, c.Dv, factor, empty);
  return write_output((f16*)c.z + at, o, c.Dv, factor, empty);
}

// The query in one_q times one key.
template <class T>
HEADWISE_INLINE float one_score(const Worker& w, const T* key) {
  float s;
  scores_direct<1>(w.one_q, round_up(w.c.Dk, W), key, 0, 1, w.c.Dk, &s, 1, key, 0);
  return s;
}

// Whether a finished row may see a key, and its score if so.
static bool pair_score(const Worker& w, const Row& row, int64_t key, float* score) {
  const Call& c = w.c;
  if (key < row.low || key >= row.high) return false;
  const int64_t start = key / PANEL * PANEL, lane = key - start;
  if (c.padding || c.mask.data || c.bias[0].data) {
    const uint32_t real = c.padding ? some_byte_bits(c.padding + w.b * c.padding_batch + start, c.K - start) : ALL;
    if (!(visible_bits(c, row, w.b, start, real) >> lane & 1)) return false;
  }
  const int64_t at = w.b * c.k.batch + w.g * c.k.head + key * c.k.row;
  if (c.type == Type::f32) *score = one_score(w, (const float*)c.k.data + at);
  else if (c.type == Type::bf16) *score = one_score(w, (const bf16*)c.k.data + at);
  else *score = one_score(w, (const f16*)c.k.data + at);
  if (bends(c)) {
    float s[32];
    for (int j = 0; j < NV; ++j) store(s + j * W, set1(0.0f));
    s[lane] = *score;
    bend_scores(c, row, w.b, start, s);
    *score = s[lane];
  }
  return true;
}

// Weights on the chosen keys of a finished row whose factor is known, from one dot product each.
static void weigh_pairs(Worker& w, const Row& row, float factor, int64_t first, int64_t last) {
  const Call& c = w.c;
  float* out = c.pair_weights + row.head * c.pair_rows[c.B * c.Q];
  const int64_t at = w.b * c.q.batch + row.head * c.q.head + row.query * c.q.row;
  const float scale = c.scale * kLog2e;
  if (c.type == Type::f32) pack_row(w.one_q, (const float*)c.q.data + at, c.Dk, scale);
  else if (c.type == Type::bf16) pack_row(w.one_q, (const bf16*)c.q.data + at, c.Dk, scale);
  else pack_row(w.one_q, (const f16*)c.q.data + at, c.Dk, scale);
  for (int64_t e = first; e < last; e += W) {
    const int n = (int)least(W, last - e);
    float s[W];
    store(s, set1(kHidden));
    uint32_t seen = 0;
    for (int i = 0; i < n; ++i) seen |= (uint32_t)pair_score(w, row, c.pair_keys[e + i], s + i) << i;
    F weight = mul(exp2(sub(load(s), set1(row.max))), set1(factor));
    weight = select(above_bits(weight, set1(1.0f)) & equal_bits(weight, weight), set1(1.0f), weight);
    store_first(out + e, select(seen, weight, set1(0.0f)), n);
  }
}

// log(m * 2^e) for m between sqrt(1/2) and sqrt(2); 0 for 1. The polynomial is that of Cephes' logf (Moshier 1992).
HEADWISE_INLINE F log_of(F m, F e) {
  const F f = sub(m, set1(1.0f)), square = mul(f, f);
  F p = set1(7.0376836292e-2f);
  p = fma(p, f, set1(-1.1514610310e-1f));
  p = fma(p, f, set1(1.1676998740e-1f));
  p = fma(p, f, set1(-1.2420140846e-1f));
  p = fma(p, f, set1(1.4249322787e-1f));
  p = fma(p, f, set1(-1.6668057665e-1f));
  p = fma(p, f, set1(2.0000714765e-1f));
  p = fma(p, f, set1(-2.4999993993e-1f));
  p = fma(p, f, set1(3.3333331174e-1f));
  F tail = mul(mul(f, square), p);
  tail = fma(e, set1(-2.12194440e-4f), tail);
  tail = fma(set1(-0.5f), square, tail);
  return fma(e, set1(0.693359375f), add(f, tail));
}

// What a row's statistics are made of, row by row in the lanes of vectors.
struct Lanes {
  static constexpr int N = 16;
  float sum[N], mantissa[N], exponent[N], max[N], weighted[N], distance[N];
  float factor[N], lse[N], entropy[N], far[N];
};

// Reads a row; false where something in it is unusual and finish_row must look.
HEADWISE_INLINE bool read_row(Lanes& x, int r, const Row& row) {
  uint32_t bits;
  __builtin_memcpy(&bits, &row.sum, 4);
  const int32_t above = (int32_t)(bits - 0x3f3504f3u);  // sqrt(1/2)
  const uint32_t rest = bits - ((uint32_t)(above >> 23) << 23);
  __builtin_memcpy(x.mantissa + r, &rest, 4);
  x.exponent[r] = (float)(above >> 23);
  x.sum[r] = row.sum;
  x.max[r] = row.max;
  x.weighted[r] = row.weighted;
  x.distance[r] = row.distance;
  return row.visible > 0 && row.sum >= 1.0f && row.sum < 1.0e30f && row.max > kHidden && row.max < 3.0e38f &&
         row.weighted > -1.0e30f;
}

// Factors, and statistics where they are wanted, of the usual rows of a tile; gives the bits of those rows.
static uint32_t finish_usual(const Call& c, const Tile& t, int64_t batch, float* factor) {
  static_assert(MR <= Lanes::N && Lanes::N % W == 0, "a tile fits");
  if (c.sinks) return 0;
  Lanes x;
  uint32_t usual = 0;
  for (int r = 0; r < t.rows; ++r) usual |= (uint32_t)read_row(x, r, t.row[r]) << r;
  for (int r = t.rows; r % W; ++r) x.sum[r] = x.mantissa[r] = 1.0f, x.exponent[r] = x.max[r] = x.weighted[r] = x.distance[r] = 0.0f;
  for (int i = 0; i < t.rows; i += W) {
    const F one = div(set1(1.0f), load(x.sum + i));
    store(factor + i, one);
    if (!c.statistics) continue;
    const F log = log_of(load(x.mantissa + i), load(x.exponent + i)), max = load(x.max + i);
    // ln 2 in two parts, the first of few digits
    store(x.lse + i, fma(max, set1(0.693359375f), fma(max, set1(-2.12194440e-4f), log)));
    store(x.entropy + i, sub(log, mul(mul(load(x.weighted + i), one), set1(0.6931471805599453f))));
    if (c.distance) store(x.far + i, mul(load(x.distance + i), one));
  }
  for (int r = 0; r < t.rows; ++r) {
    if (!(usual >> r & 1)) continue;
    const Row& row = t.row[r];
    const int64_t at = (batch * c.H + row.head) * c.Q + row.query;
    if (c.top) c.top[at] = row.max;
    if (!c.statistics) continue;
    c.lse[at] = x.lse[r];
    c.entropy[at] = x.entropy[r] < 0.0f ? 0.0f : x.entropy[r];
    c.max_weight[at] = factor[r];
    c.argmax[at] = row.argmax;
    c.visible[at] = row.visible;
    if (c.distance) c.distance[at] = x.far[r];
  }
  return usual;
}

static void finish_tile(Worker& w, Tile& t) {
  const Call& c = w.c;
  float factors[Lanes::N];
  const uint32_t usual = finish_usual(c, t, w.b, factors);
  for (int r = 0; r < t.rows; ++r) {
    Row& row = t.row[r];
    float *o = t.o + r * w.ldo, *classes = t.classes + r * w.ldc;
    bool sound = !row.visible || row.sum != row.sum || (row.max > kHidden && row.weighted == row.weighted);
    float factor = 0.0f;
    if (sound) {
      factor = usual >> r & 1 ? factors[r] : finish_row(c, row, w.b);
      sound = write_row(w, row, o, factor) || row.sum != row.sum;
    }
    if (!sound) {
      careful_row(w, row, o, classes);
      factor = finish_row(c, row, w.b);
      write_row(w, row, o, factor);
    }
    if (c.class_weights)
      write_output(c.class_weights + ((w.b * c.H + row.head) * c.Q + row.query) * c.n_classes, classes, c.n_classes,
                   factor, row.visible == 0);
    if (c.pair_rows) {
      const int64_t* span = c.pair_rows + w.b * c.Q + row.query;
      if (span[0] < span[1]) weigh_pairs(w, row, factor, span[0], span[1]);
    }
  }
}

struct Partial {
  float max, sum, weighted, distance;
  int32_t argmax, visible, unused[2];
};
static_assert(sizeof(Partial) == kPartialState * sizeof(float), "the planner counts in floats");

HEADWISE_INLINE float* partial_of(const Worker& w, int64_t slot, int64_t split, int64_t r) {
  return w.plan.partials + ((slot * w.plan.splits + split) * w.plan.max_rows + r) * w.plan.partial_floats;
}

static void save_partial(const Worker& w, int64_t slot, int64_t split) {
  int64_t n = 0;
  for (int i = 0; i < w.n_tiles; ++i) {
    const Tile& t = w.tiles[i];
    for (int r = 0; r < t.rows; ++r, ++n) {
      float* to = partial_of(w, slot, split, n);
      const Row& row = t.row[r];
      Partial state = {row.max, row.sum, row.weighted, row.distance, row.argmax, row.visible, {0, 0}};
      __builtin_memcpy(to, &state, sizeof state);
      to += kPartialState;
      const F none = set1(0.0f);
      for (int64_t d = 0; d < w.ldo; d += W) store(to + d, t.started ? load(t.o + r * w.ldo + d) : none);
      to += w.ldo;
      for (int64_t d = 0; d < w.ldc; d += W) store(to + d, t.started ? load(t.classes + r * w.ldc + d) : none);
    }
  }
}

static void merge_row(Worker& w, Row& row, int64_t slot, int64_t n, float* o, float* classes) {
  for (int64_t split = 0; split < w.plan.splits; ++split) {
    Partial p;
    const float* at = partial_of(w, slot, split, n);
    __builtin_memcpy(&p, at, sizeof p);
    if (p.max > row.max) {
      row.max = p.max;
      row.argmax = p.argmax;
    }
  }
  for (int64_t d = 0; d < w.ldo; d += W) store(o + d, set1(0.0f));
  for (int64_t d = 0; d < w.ldc; d += W) store(classes + d, set1(0.0f));
  for (int64_t split = 0; split < w.plan.splits; ++split) {
    Partial p;
    const float* at = partial_of(w, slot, split, n);
    __builtin_memcpy(&p, at, sizeof p);
    row.visible += p.visible;
    if (!(p.max > kHidden)) continue;
    const float f = exp2_one(p.max - row.max);
    row.sum += f * p.sum;
    row.weighted += f * (p.weighted + (p.max - row.max) * p.sum);
    row.distance += f * p.distance;
    const F factor = set1(f);
    at += kPartialState;
    for (int64_t d = 0; d < w.ldo; d += W) store(o + d, fma(factor, load(at + d), load(o + d)));
    at += w.ldo;
    for (int64_t d = 0; d < w.ldc; d += W) store(classes + d, fma(factor, load(at + d), load(classes + d)));
  }
}

static void merge_partials(Worker& w, int64_t slot) {
  int64_t n = 0;
  for (int i = 0; i < w.n_tiles; ++i) {
    Tile& t = w.tiles[i];
    for (int r = 0; r < t.rows; ++r, ++n)
      merge_row(w, t.row[r], slot, n, t.o + r * w.ldo, t.classes + r * w.ldc);
    t.started = true;
  }
}
