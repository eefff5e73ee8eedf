// The plain call, tensors in and tensors out: no rule beside causal, window, scale and soft cap, nothing wanted beside
// the row statistics. A short call would otherwise spend its time on Python's view of shapes and strides.
#include "plain.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>

#include "exchange.h"
#include "headwise.h"

namespace headwise {

namespace {

const dlpack::Exchange* exchange = nullptr;

// One allocation: what describes up to five tensors, then their memory. The last to let go frees it.
struct Block {
  struct Piece {
    dlpack::Managed managed;
    int64_t shape[4], strides[4];
  };
  std::atomic<int> owners;
  Piece piece[5];
};

void let_go(dlpack::Managed* managed) {
  Block* block = static_cast<Block*>(managed->context);
  if (block->owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  block->~Block();
  std::free(block);
}

Block* new_block(size_t bytes, int pieces, char** data) {
  void* room = std::malloc(sizeof(Block) + bytes + 64);
  if (!room) throw std::bad_alloc();
  Block* block = new (room) Block;
  block->owners = pieces;
  const uintptr_t at = reinterpret_cast<uintptr_t>(block + 1);
  *data = reinterpret_cast<char*>((at + 63) / 64 * 64);
  return block;
}

void describe(Block* block, int index, void* data, dlpack::DataType type, int ndim) {
  Block::Piece& piece = block->piece[index];
  piece.managed = {{1, 1}, block, let_go, 0, {data, {dlpack::kCpu, 0}, ndim, type, piece.shape, piece.strides, 0}};
}

// Hands every piece to Python; an owner that could not be handed over lets go.
bool hand_over(Block* block, int pieces, PyObject* tuple, int at) {
  bool sound = true;
  for (int i = 0; i < pieces; ++i) {
    void* object = nullptr;
    if (!sound) {
      let_go(&block->piece[i].managed);
    } else if (exchange->object_from_managed(&block->piece[i].managed, &object)) {
      sound = false;
    } else {
      PyTuple_SET_ITEM(tuple, at + i, static_cast<PyObject*>(object));
    }
  }
  return sound;
}

bool type_of(const dlpack::Tensor& x, Type* type) {
  if (x.type.lanes != 1) return false;
  if (x.type.code == dlpack::kFloat && x.type.bits == 32) *type = Type::f32;
  else if (x.type.code == dlpack::kFloat && x.type.bits == 16) *type = Type::f16;
  else if (x.type.code == dlpack::kBfloat && x.type.bits == 16) *type = Type::bf16;
  else return false;
  return true;
}

// Reads a tensor of four axes whose last is contiguous.
bool look(PyObject* object, dlpack::Tensor* x, Array* array, Type* type) {
  if (exchange->tensor_from_object(object, x)) {
    PyErr_Clear();  // the careful road says what is wrong
    return false;
  }
  if (x->ndim != 4 || x->device.type != dlpack::kCpu || !type_of(*x, type)) return false;
  if (x->shape[3] < 1 || (x->strides[3] != 1 && x->shape[3] != 1)) return false;
  *array = {static_cast<const char*>(x->data) + x->byte_offset, x->strides[0], x->strides[1], x->strides[2]};
  return true;
}

// Fills the call from q, k and v; false where the careful road must look.
bool read_tensors(Call& c, PyObject* q, PyObject* k, PyObject* v) {
  dlpack::Tensor tq, tk, tv;
  Type type_k, type_v;
  if (!look(q, &tq, &c.q, &c.type) || !look(k, &tk, &c.k, &type_k) || !look(v, &tv, &c.v, &type_v)) return false;
  c.B = tq.shape[0], c.H = tq.shape[1], c.Q = tq.shape[2], c.Dk = tq.shape[3];
  c.G = tk.shape[1], c.K = tk.shape[2], c.Dv = tv.shape[3];
  return type_k == c.type && type_v == c.type && tk.shape[0] == c.B && tv.shape[0] == c.B && tk.shape[3] == c.Dk &&
         tv.shape[1] == c.G && tv.shape[2] == c.K && c.B > 0 && c.H > 0 && c.Q > 0 && c.G > 0 && c.K > 0 &&
         c.H % c.G == 0;
}

// Room for z: queries before heads, as torch's own attention has it, so that joining the heads copies nothing.
Block* room_for_output(Call& c, const dlpack::DataType type) {
  char* data = nullptr;
  Block* block = new_block(static_cast<size_t>(c.B * c.H * c.Q * c.Dv) * (type.bits / 8), 1, &data);
  describe(block, 0, data, type, 4);
  int64_t *shape = block->piece[0].shape, *strides = block->piece[0].strides;
  shape[0] = c.B, shape[1] = c.H, shape[2] = c.Q, shape[3] = c.Dv;
  strides[0] = c.Q * c.H * c.Dv, strides[1] = c.Dv, strides[2] = c.H * c.Dv, strides[3] = 1;
  c.z = data;
  c.z_stride = {nullptr, strides[0], strides[1], strides[2]};
  return block;
}

Block* room_for_rows(Call& c) {
  const int64_t n = c.B * c.H * c.Q;
  char* data = nullptr;
  Block* block = new_block(static_cast<size_t>(n) * (3 * sizeof(float) + 2 * sizeof(int64_t)), 5, &data);
  c.argmax = reinterpret_cast<int64_t*>(data);
  c.visible = c.argmax + n;
  c.lse = reinterpret_cast<float*>(c.visible + n);
  c.entropy = c.lse + n;
  c.max_weight = c.entropy + n;
  const dlpack::DataType real = {dlpack::kFloat, 32, 1}, whole = {dlpack::kInt, 64, 1};
  void* const at[5] = {c.lse, c.entropy, c.max_weight, c.argmax, c.visible};
  for (int i = 0; i < 5; ++i) {
    describe(block, i, at[i], i < 3 ? real : whole, 3);
    int64_t *shape = block->piece[i].shape, *strides = block->piece[i].strides;
    shape[0] = c.B, shape[1] = c.H, shape[2] = c.Q;
    strides[0] = c.H * c.Q, strides[1] = c.Q, strides[2] = 1;
  }
  return block;
}

PyObject* objects(Block* output, Block* rows) {
  PyObject* tuple = PyTuple_New(rows ? 6 : 1);
  if (!tuple) {  // no piece has an owner yet
    std::free(output);
    std::free(rows);
    return nullptr;
  }
  bool sound = hand_over(output, 1, tuple, 0);
  if (rows) sound = hand_over(rows, 5, tuple, 1) && sound;
  if (sound) return tuple;
  Py_DECREF(tuple);
  return nullptr;
}

void compute(const Call& c, int threads, const Target& target) {
  PyThreadState* state = PyEval_SaveThread();
  try {
    run_forward(c, threads, target);
  } catch (...) {
    PyEval_RestoreThread(state);
    throw;
  }
  PyEval_RestoreThread(state);
}

}  // namespace

bool use_exchange(PyObject* capsule) {
  const void* table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!table) {
    PyErr_Clear();
    return false;
  }
  const auto* found = static_cast<const dlpack::Exchange*>(table);
  while (found && found->version.major != 1) found = found->previous;
  if (!found || !found->tensor_from_object) return false;
  exchange = found;
  return true;
}

PyObject* run_plain(const Plain& wanted, PyObject* q, PyObject* k, PyObject* v) {
  Call c = {};
  if (!exchange || !read_tensors(c, q, k, v)) Py_RETURN_NONE;
  const double scale = wanted.usual_scale ? std::pow(static_cast<double>(c.Dk), -0.5) : wanted.scale;
  if (!std::isfinite(scale) || !std::isfinite(wanted.softcap) || wanted.softcap < 0.0) Py_RETURN_NONE;
  c.scale = static_cast<float>(scale);
  c.softcap = static_cast<float>(wanted.softcap);
  c.causal = wanted.causal;
  c.window = wanted.window;
  c.offset = wanted.usual_offset ? c.K - c.Q : wanted.offset;
  std::vector<int32_t> kv_map(static_cast<size_t>(c.H));
  for (int64_t h = 0; h < c.H; ++h) kv_map[h] = static_cast<int32_t>(h / (c.H / c.G));
  c.kv_map = kv_map.data();
  static const dlpack::DataType types[3] = {{dlpack::kFloat, 32, 1}, {dlpack::kBfloat, 16, 1}, {dlpack::kFloat, 16, 1}};
  Block *output = room_for_output(c, types[static_cast<int>(c.type)]), *rows = nullptr;
  try {
    if (wanted.statistics) rows = room_for_rows(c);
    c.statistics = wanted.statistics;
    compute(c, wanted.threads, *wanted.target);
  } catch (...) {
    std::free(output);
    std::free(rows);
    throw;
  }
  return objects(output, rows);
}

}  // namespace headwise
