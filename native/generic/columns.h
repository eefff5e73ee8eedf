// Attention received: for every key the sum over rows of its weight, from each row's lse. An item is one
// key-value head and one block of keys, against all rows of the query heads that read it.

struct ColumnSizes {
  size_t rows_at, q_at, keys_at, s_at, bits_at, real_at, sum_at, total;
};

static ColumnSizes column_sizes(const Call& c, const Plan& plan) {
  ColumnSizes z;
  size_t at = 0;
  auto take = [&at](size_t bytes) {
    size_t here = at;
    at += (bytes + 127) / 64 * 64;
    return here;
  };
  z.rows_at = take(MR * sizeof(Row));
  z.q_at = take((MR * c.Dk + W) * 4);
  z.keys_at = take(plan.key_block * c.Dk * 4 + 64);
  z.s_at = take(MR * plan.key_block * 4);
  z.bits_at = take(MR * (plan.key_block / PANEL) * 4);
  z.real_at = take((plan.key_block / PANEL) * 4);
  z.sum_at = take(2 * plan.key_block * 4);
  z.total = at;
  return z;
}

static size_t column_scratch(const Call& c, const Plan& plan) { return column_sizes(c, plan).total + 64; }

// Adds the weights of a tile to the sums, with Kahan's compensation: there may be very many rows.
static void add_columns(const Worker& w, const Tile& t, const float* lse, const float* factor, float* sum) {
  float* lost = sum + w.plan.key_block;
  for (int i = 0; i < w.count; ++i)
    for (int j = 0; j < NV; ++j) {
      F tile = set1(0.0f);
      for (int r = 0; r < t.rows; ++r) {
        if (factor[r] == 0.0f) continue;
        F p = mul(exp2(sub(load(w.s + r * w.lds + i * PANEL + j * W), set1(lse[r]))), set1(factor[r]));
        if (!w.exact[i]) p = select((w.bits[i * MR + r] >> (j * W)) & (uint32_t)((1ull << W) - 1), p, set1(0.0f));
        tile = add(tile, p);
      }
      float *to = sum + w.index[i] * PANEL + j * W, *of = lost + w.index[i] * PANEL + j * W;
      const F before = load(to), part = sub(tile, load(of)), after = add(before, part);
      store(of, sub(sub(after, before), part));
      store(to, after);
    }
}

// The rows of one head against the keys [k0, k1).
static void head_columns(Worker& w, int32_t head, int64_t k0, int64_t k1, float* sum) {
  const Call& c = w.c;
  for (int64_t j = 0; j < 2 * w.plan.key_block; j += W) store(sum + j, set1(0.0f));
  for (int64_t q0 = 0; q0 < c.Q; q0 += MR) {
    Tile t = {(int)least(MR, c.Q - q0), MR, w.rows, w.q, nullptr, nullptr, c.K, 0, 0, c.K, false};
    float lse[MR], factor[MR];
    for (int r = 0; r < t.rows; ++r) {
      Row row = {kHidden, 0.0f, 0.0f, 0.0f, -1, 0, head, 0, q0 + r, 0, 0};
      row_range(c, row, 0, c.K);
      w.rows[r] = row;
      t.low_any = least(t.low_any, row.low);
      t.low_all = most(t.low_all, row.low);
      t.high_any = most(t.high_any, row.high);
      t.high_all = least(t.high_all, row.high);
      const int64_t at = (w.b * c.H + head) * c.Q + q0 + r;
      factor[r] = column_factor(c, at, head);
      if (c.row_weights) factor[r] *= c.row_weights[w.b * c.row_weights_batch + q0 + r];
      lse[r] = c.lse[at] * kLog2e;
    }
    list_panels(w, t, k0, k1);
    if (!w.count) continue;
    pack_tile_any(w, t);
    make_scores(w, t, k0, k1);
    add_columns(w, t, lse, factor, sum);
  }
}

static void columns(const Call& c, const Plan& plan, char* scratch, int64_t item) {
  const ColumnSizes z = column_sizes(c, plan);
  Worker w(c, plan);
  const int64_t group = item % (c.B * c.G), k0 = item / (c.B * c.G) * plan.key_block;
  const int64_t k1 = least(k0 + plan.key_block, c.K);
  w.b = group / c.G;
  w.g = group % c.G;
  w.ldq = c.Dk;
  w.lds = plan.key_block;
  w.rows = (Row*)(scratch + z.rows_at);
  w.q = (float*)(scratch + z.q_at);
  w.keys = (float*)(scratch + z.keys_at);
  w.s = (float*)(scratch + z.s_at);
  w.bits = (uint32_t*)(scratch + z.bits_at);
  w.real = (uint32_t*)(scratch + z.real_at);
  float* sum = (float*)(scratch + z.sum_at);
  w.packed_values = nullptr;
  const bool any = set_block(w, k0, k1);
  for (int32_t at = plan.group_start[w.g]; at < plan.group_start[w.g + 1]; ++at) {
    const int32_t head = plan.heads[at];
    float* out = c.received + (w.b * c.H + head) * c.K + k0;
    if (any) head_columns(w, head, k0, k1, sum);
    for (int64_t j = 0; j < k1 - k0; ++j) out[j] = any ? sum[j] : 0.0f;
  }
}
