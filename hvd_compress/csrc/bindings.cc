// The Python binding: the four functions over addresses. Whoever calls it keeps the memory alive and of the right size;
// hvd_compress.codecs is that caller. The GIL is released while a kernel runs.
#include <pybind11/pybind11.h>

#include "codec.h"
#include "random.h"

namespace py = pybind11;
using namespace hvd_compress;

PYBIND11_MODULE(_kernels, m) {
  py::enum_<Kind>(m, "Kind")
      .value("none", Kind::kNone)
      .value("fp16", Kind::kFp16)
      .value("bf16", Kind::kBf16)
      .value("adacomp", Kind::kAdaComp)
      .value("qsgd", Kind::kQsgd)
      .value("qsgdinf", Kind::kQsgdInf)
      .value("nuqsgd", Kind::kNuqsgd);
  py::enum_<DType>(m, "DType")
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float32", DType::kFloat32)
      .value("float64", DType::kFloat64);
  py::enum_<Coding>(m, "Coding").value("fixed", Coding::kFixed).value("elias", Coding::kElias);

  py::register_exception<MalformedPayload>(m, "PayloadError", PyExc_ValueError).attr("__module__") = "hvd_compress";

  py::class_<Codec>(m, "Codec")
      .def(py::init([](Kind kind, int64_t bin, float c, int bits, int64_t bucket, Coding coding, bool feedback) {
             return create(kind, Options{bin, c, bits, bucket, coding, feedback});
           }),
           py::arg("kind"), py::kw_only(), py::arg("bin") = 0, py::arg("c") = 2.0f, py::arg("bits") = 0,
           py::arg("bucket") = 0, py::arg("coding") = Coding::kFixed, py::arg("feedback") = false)
      .def("max_payload", &Codec::max_payload)
      .def("encode",
           [](const Codec& codec, uintptr_t grad, DType dtype, uintptr_t residual_in, uintptr_t residual_out, size_t n,
              uint64_t seed, uintptr_t out) {
             Encoded e;
             {
               py::gil_scoped_release release;
               e = codec.encode(reinterpret_cast<const void*>(grad), dtype, reinterpret_cast<const float*>(residual_in),
                                reinterpret_cast<float*>(residual_out), n, seed, reinterpret_cast<uint8_t*>(out));
             }
             return py::make_tuple(e.bytes, e.selected, e.residual_sq, e.finite);
           })
      .def("decode_add",
           [](const Codec& codec, uintptr_t payload, size_t bytes, float weight, uintptr_t out, size_t n) {
             py::gil_scoped_release release;
             codec.decode_add(reinterpret_cast<const uint8_t*>(payload), bytes, weight, reinterpret_cast<float*>(out), n);
           });

  m.def("mix_seed", &mix_seed, py::arg("seed"), py::arg("rank"), py::arg("step"), py::arg("segment"));
  m.def("checksum",
        [](uintptr_t data, size_t bytes) { return checksum(reinterpret_cast<const uint8_t*>(data), bytes); });
}
