// Python's door: reads tuples into a Call, lets go of the interpreter, runs. Shapes and dtypes are the caller's duty
// (headwise.kernels.cpu); here only what would make the reading itself unsafe is checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "headwise.h"
#include "plain.h"

namespace nb = nanobind;
using headwise::Call;

namespace {

int64_t item_at(nb::handle tuple, Py_ssize_t i) {
  const int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

void need(nb::handle tuple, Py_ssize_t size, const char* name) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != size)
    throw nb::type_error((std::string(name) + " must be a tuple of " + std::to_string(size)).c_str());
}

template <class T>
T* pointer(nb::handle tuple, Py_ssize_t i) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple.ptr(), i))));
}

headwise::Array strides(nb::handle tuple, const char* name) {
  need(tuple, 4, name);
  return {nullptr, item_at(tuple, 0), item_at(tuple, 1), item_at(tuple, 2)};
}

headwise::Plane plane(nb::handle tuple, const char* name) {
  need(tuple, 5, name);
  return {pointer<const void>(tuple, 0), item_at(tuple, 1), item_at(tuple, 2), item_at(tuple, 3), item_at(tuple, 4)};
}

struct Reader {
  Call c = {};
  std::vector<int32_t> kv_map;

  // type, (B, H, G, Q, K, Dk, Dv), (q, k, v, z), their strides
  void tensors(int type, nb::handle shape, nb::handle data, nb::handle q, nb::handle k, nb::handle v, nb::handle z) {
    need(shape, 7, "shape");
    need(data, 4, "data");
    c.type = static_cast<headwise::Type>(type);
    c.B = item_at(shape, 0), c.H = item_at(shape, 1), c.G = item_at(shape, 2), c.Q = item_at(shape, 3);
    c.K = item_at(shape, 4), c.Dk = item_at(shape, 5), c.Dv = item_at(shape, 6);
    c.q = strides(q, "q strides"), c.k = strides(k, "k strides"), c.v = strides(v, "v strides");
    c.z_stride = strides(z, "z strides");
    c.q.data = pointer<const void>(data, 0);
    c.k.data = pointer<const void>(data, 1);
    c.v.data = pointer<const void>(data, 2);
    c.z = pointer<void>(data, 3);
  }

  void heads(nb::handle map) {
    kv_map.resize(c.H);
    const int64_t group = c.G ? c.H / c.G : 1;
    if (map.is_none()) {
      for (int64_t h = 0; h < c.H; ++h) kv_map[h] = static_cast<int32_t>(h / group);
    } else {
      need(map, c.H, "kv_map");
      for (int64_t h = 0; h < c.H; ++h) {
        kv_map[h] = static_cast<int32_t>(item_at(map, h));
        if (kv_map[h] < 0 || kv_map[h] >= c.G) throw nb::value_error("kv_map names a key-value head that is not there");
      }
    }
    c.kv_map = kv_map.data();
  }

  // (causal, window, offset), padding (data, batch stride), mask, at most two of (bias, type), distance bias, sinks
  void rules(nb::handle visible, nb::handle padding, nb::handle mask, nb::handle added, nb::handle distance,
             uintptr_t sinks) {
    need(visible, 3, "visible");
    c.causal = item_at(visible, 0) != 0;
    c.window = item_at(visible, 1);
    c.offset = item_at(visible, 2);
    if (!padding.is_none()) {
      need(padding, 2, "padding");
      c.padding = pointer<const uint8_t>(padding, 0);
      c.padding_batch = item_at(padding, 1);
    }
    if (!mask.is_none()) c.mask = plane(mask, "mask");
    if (!added.is_none()) {
      if (!PyTuple_Check(added.ptr()) || PyTuple_GET_SIZE(added.ptr()) > 2)
        throw nb::type_error("added must be a tuple of at most two (bias, type)");
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(added.ptr()); ++i) {
        nb::handle term = PyTuple_GET_ITEM(added.ptr(), i);
        need(term, 2, "a term of added");
        c.bias[i] = plane(PyTuple_GET_ITEM(term.ptr(), 0), "bias");
        c.bias_type[i] = static_cast<headwise::Type>(item_at(term, 1));
      }
    }
    if (!distance.is_none()) {
      need(distance, 4, "distance bias");
      c.distance_bias = pointer<const float>(distance, 0);
      c.distance_bias_head = item_at(distance, 1);
      c.distance_length = item_at(distance, 2);
      c.distance_zero = item_at(distance, 3);
    }
    c.sinks = reinterpret_cast<const float*>(sinks);
  }
};

const headwise::Target& target_of(int index) {
  if (index < 0 || index >= headwise::target_count()) throw nb::index_error("no such target");
  return *headwise::target_at(index);
}

void forward(int target, int threads, int type, nb::handle shape, nb::handle data, nb::handle q, nb::handle k,
             nb::handle v, nb::handle z, nb::handle kv_map, float scale, float softcap, nb::handle visible,
             nb::handle padding, nb::handle mask, nb::handle added, nb::handle distance_bias, uintptr_t sinks,
             nb::handle rows, nb::handle pairs, nb::handle classes) {
  Reader reader;
  reader.tensors(type, shape, data, q, k, v, z);
  reader.heads(kv_map);
  reader.rules(visible, padding, mask, added, distance_bias, sinks);
  Call& c = reader.c;
  c.scale = scale;
  c.softcap = softcap;
  if (!rows.is_none()) {  // lse, entropy, max_weight (float), argmax, visible (int64), sink, distance, top
    need(rows, 8, "rows");
    c.statistics = true;
    c.lse = pointer<float>(rows, 0);
    c.entropy = pointer<float>(rows, 1);
    c.max_weight = pointer<float>(rows, 2);
    c.argmax = pointer<int64_t>(rows, 3);
    c.visible = pointer<int64_t>(rows, 4);
    c.sink = pointer<float>(rows, 5);
    c.distance = pointer<float>(rows, 6);
    c.top = pointer<float>(rows, 7);
  }
  if (!pairs.is_none()) {  // offsets, keys, weights
    need(pairs, 3, "pairs");
    c.pair_rows = pointer<const int64_t>(pairs, 0);
    c.pair_keys = pointer<const int64_t>(pairs, 1);
    c.pair_weights = pointer<float>(pairs, 2);
  }
  if (!classes.is_none()) {  // class of each key, its batch stride, number of classes, weights
    need(classes, 4, "classes");
    c.classes = pointer<const uint8_t>(classes, 0);
    c.classes_batch = item_at(classes, 1);
    c.n_classes = item_at(classes, 2);
    c.class_weights = pointer<float>(classes, 3);
  }
  const headwise::Target& chosen = target_of(target);
  nb::gil_scoped_release release;
  headwise::run_forward(c, threads, chosen);
}

void received(int target, int threads, int type, nb::handle shape, nb::handle data, nb::handle q, nb::handle k,
              nb::handle kv_map, float scale, float softcap, nb::handle visible, nb::handle padding, nb::handle mask,
              nb::handle added, nb::handle distance_bias, uintptr_t sinks, uintptr_t lse,
              nb::handle row_weights, uintptr_t out) {
  Reader reader;
  reader.tensors(type, shape, data, q, k, k, q);
  reader.heads(kv_map);
  reader.rules(visible, padding, mask, added, distance_bias, sinks);
  Call& c = reader.c;
  c.scale = scale;
  c.softcap = softcap;
  c.lse = reinterpret_cast<float*>(lse);
  if (!row_weights.is_none()) {
    need(row_weights, 2, "row_weights");
    c.row_weights = pointer<const float>(row_weights, 0);
    c.row_weights_batch = item_at(row_weights, 1);
  }
  c.received = reinterpret_cast<float*>(out);
  const headwise::Target& chosen = target_of(target);
  nb::gil_scoped_release release;
  headwise::run_columns(c, threads, chosen);
}

// scale and offset None: the usual ones; window and softcap 0: none.
nb::object plain(int target, int threads, nb::handle q, nb::handle k, nb::handle v, nb::handle scale, double softcap,
                 bool causal, int64_t window, nb::handle offset, bool statistics) {
  headwise::Plain wanted = {&target_of(target), threads, scale.is_none(), offset.is_none(), 0.0, softcap, causal,
                            window, 0, statistics};
  if (!wanted.usual_scale) wanted.scale = nb::cast<double>(scale);
  if (!wanted.usual_offset) wanted.offset = nb::cast<int64_t>(offset);
  PyObject* found = headwise::run_plain(wanted, q.ptr(), k.ptr(), v.ptr());
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (int i = 0; i < headwise::target_count(); ++i) names.emplace_back(headwise::target_at(i)->name);
  return names;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The CPU kernel of headwise.kernels; use it through headwise.kernels.cpu.";
  m.def("targets", &targets, "Names of the targets that this machine can run, best first.");
  m.def("team", [] { return std::string(headwise::team_kind()); }, "What runs the threads.");
  m.def("use_exchange", [](nb::handle capsule) { return headwise::use_exchange(capsule.ptr()); }, nb::arg("capsule"),
        "Takes torch's table of DLPack functions; False where it is of another version.");
  m.def("plain", &plain, nb::arg("target"), nb::arg("threads"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("scale").none(), nb::arg("softcap"), nb::arg("causal"), nb::arg("window"), nb::arg("offset").none(),
        nb::arg("statistics"));
  m.def("forward", &forward, nb::arg("target"), nb::arg("threads"), nb::arg("type"), nb::arg("shape"), nb::arg("data"),
        nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("z"), nb::arg("kv_map").none(), nb::arg("scale"),
        nb::arg("softcap"), nb::arg("visible"), nb::arg("padding").none(), nb::arg("mask").none(),
        nb::arg("added").none(), nb::arg("distance_bias").none(), nb::arg("sinks"),
        nb::arg("rows").none(), nb::arg("pairs").none(), nb::arg("classes").none());
  m.def("received", &received, nb::arg("target"), nb::arg("threads"), nb::arg("type"), nb::arg("shape"),
        nb::arg("data"), nb::arg("q"), nb::arg("k"), nb::arg("kv_map").none(), nb::arg("scale"), nb::arg("softcap"),
        nb::arg("visible"), nb::arg("padding").none(), nb::arg("mask").none(), nb::arg("added").none(),
        nb::arg("distance_bias").none(), nb::arg("sinks"), nb::arg("lse"),
        nb::arg("row_weights").none(), nb::arg("out"));
}
