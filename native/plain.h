// The plain call's door.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

namespace headwise {

struct Target;

struct Plain {
  const Target* target;
  int threads;
  bool usual_scale, usual_offset;  // d_k to the power -0.5; keys - queries
  double scale, softcap;           // softcap 0: none
  bool causal;
  int64_t window, offset;  // window 0: none
  bool statistics;
};

// Takes torch's table of functions; false where this build cannot use it.
bool use_exchange(PyObject* capsule);

// (z,) or (z, lse, entropy, max_weight, argmax, visible); None where the tensors need the careful road (anything but
// three float tensors on the CPU that fit each other and lie contiguous in their last axis); null with an error set.
PyObject* run_plain(const Plain&, PyObject* q, PyObject* k, PyObject* v);

}  // namespace headwise
