// One item from beginning to end: the entry that the planner calls.

static void forward(const Call& c, const Plan& plan, char* scratch, int64_t item) {
  Worker w = make_worker(c, plan, scratch);
  const int64_t split = item % plan.splits, rest = item / plan.splits;
  // Under causal masks the last rows cost most: they go first.
  const int64_t block = plan.blocks - 1 - rest / (c.B * c.G), group = rest % (c.B * c.G);
  w.b = group / c.G;
  w.g = group % c.G;
  if (plan.group_start[w.g] == plan.group_start[w.g + 1]) return;
  const int64_t q0 = block * plan.block_queries, q1 = least(q0 + plan.block_queries, c.Q);
  const int64_t k0 = split * plan.split_keys, k1 = least(k0 + plan.split_keys, c.K);
  set_rows(w, q0, q1, k0, k1);
  all_blocks(w, k0, k1);
  if (plan.splits == 1) {
    for (int i = 0; i < w.n_tiles; ++i) finish_tile(w, w.tiles[i]);
    return;
  }
  const int64_t slot = group * plan.blocks + block;
  save_partial(w, slot, split);
  if (__atomic_sub_fetch(&plan.waiting[slot], 1, __ATOMIC_ACQ_REL) == 0) {
    set_rows(w, q0, q1, 0, c.K);
    merge_partials(w, slot);
    for (int i = 0; i < w.n_tiles; ++i) finish_tile(w, w.tiles[i]);
  }
}
