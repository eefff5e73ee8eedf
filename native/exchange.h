// torch's tensors without Python between: the structures of DLPack's C exchange interface, version 1
// (github.com/dmlc/dlpack, Apache-2.0), of which torch hands out a table as torch.Tensor.__dlpack_c_exchange_api__.
#pragma once

#include <stdint.h>

namespace headwise {
namespace dlpack {

enum DeviceType : int32_t { kCpu = 1 };
enum Code : uint8_t { kInt = 0, kFloat = 2, kBfloat = 4 };

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, id;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType type;
  int64_t *shape, *strides;  // strides count elements
  uint64_t byte_offset;
};

struct Managed {
  Version version;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  Tensor tensor;
};

struct Exchange {
  Version version;
  Exchange* previous;
  int (*allocate)(Tensor*, Managed**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, Managed**);
  int (*object_from_managed)(Managed*, void**);  // takes the tensor over
  int (*tensor_from_object)(void*, Tensor*);     // looks, holds nothing; may be null
  int (*stream)(int32_t, int32_t, void**);
};

}  // namespace dlpack
}  // namespace headwise
