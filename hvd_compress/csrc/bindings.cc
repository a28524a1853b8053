// The Python binding: the five functions over addresses. Whoever calls it keeps the memory alive and of the right size;
// hvd_compress.codecs is that caller. The GIL is released while a kernel runs.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "codec.h"
#include "message.h"
#include "meter.h"
#include "random.h"
#include "scatter.h"
#include "session_state.h"
#include "stand_in.h"

namespace py = pybind11;
using namespace hvd_compress;

namespace {

uint8_t* bytes_at(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }
float* floats_at(uintptr_t address) { return reinterpret_cast<float*>(address); }

std::vector<Bytes> bytes_of(const std::vector<std::pair<uintptr_t, size_t>>& payloads) {
  std::vector<Bytes> all;
  for (const auto& [address, bytes] : payloads) all.emplace_back(bytes_at(address), bytes);
  return all;
}

// Offset and length of each payload by its segment's index, in the order in which they stand in the message.
py::tuple as_tuple(const Message& message) {
  py::dict payloads;
  for (const Entry& entry : message.entries) payloads[py::int_(entry.index)] = py::make_tuple(entry.offset, entry.bytes);
  return py::make_tuple(message.flags, message.digest, message.step, message.seconds, payloads);
}

void bind_messages(py::module_& m) {
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("ENTRY_BYTES") = kEntryBytes;
  m.def("write_entry", [](uintptr_t at, uint32_t index, uint64_t bytes) { write_entry(bytes_at(at), index, bytes); });
  m.def("finish_message", [](uintptr_t message, size_t end, uint32_t flags, uint64_t digest, uint64_t step, float seconds) {
    return finish_message(bytes_at(message), end, {flags, digest, step, seconds});
  });
  m.def("read_messages", [](uintptr_t data, size_t bytes, int ranks) {
    py::list messages;
    for (const Message& message : read_messages(bytes_at(data), bytes, ranks)) messages.append(as_tuple(message));
    return messages;
  });
}

void bind_chunks(py::module_& m) {
  py::class_<Chunks>(m, "Chunks")
      .def(py::init([](const std::vector<std::tuple<uint32_t, std::shared_ptr<Codec>, size_t>>& segments, size_t owners) {
        std::vector<Part> parts;
        for (const auto& [index, codec, n] : segments) parts.push_back({index, codec, n});
        return Chunks(std::move(parts), owners);
      }))
      .def("pieces",
           [](const Chunks& chunks, size_t owner) {
             std::vector<std::tuple<uint32_t, size_t, size_t>> pieces;
             for (const Piece& piece : chunks.pieces(owner)) pieces.emplace_back(piece.index, piece.begin, piece.end);
             return pieces;
           })
      .def_property_readonly("split_room", &Chunks::split_room)
      .def("message_room", &Chunks::message_room)
      .def("split", [](const Chunks& chunks, uintptr_t message, size_t bytes, uintptr_t out) {
        py::gil_scoped_release release;
        return chunks.split(bytes_at(message), bytes, bytes_at(out));
      });
  m.def("encode_again", [](const Codec& codec, const std::vector<std::pair<uintptr_t, size_t>>& payloads, float weight,
                           uintptr_t residual_in, uintptr_t residual_out, size_t n, const Step& step, uintptr_t scratch,
                           uintptr_t out) {
    const std::vector<Bytes> all = bytes_of(payloads);
    py::gil_scoped_release release;
    return encode_again(codec, all, weight, floats_at(residual_in), floats_at(residual_out), n, step, floats_at(scratch),
                        bytes_at(out));
  });
}

void bind_sessions(py::module_& m) {
  py::class_<Counters>(m, "Counters")
      .def_readonly("rounds", &Counters::rounds)
      .def_readonly("grad_bytes", &Counters::grad_bytes)
      .def_readonly("gathered_bytes", &Counters::gathered_bytes)
      .def_readonly("scattered_bytes", &Counters::scattered_bytes)
      .def_readonly("reduced_bytes", &Counters::reduced_bytes)
      .def_readonly("gathered", &Counters::gathered)
      .def_readonly("scattered", &Counters::scattered)
      .def_readonly("reduced", &Counters::reduced)
      .def_readonly("selected", &Counters::selected)
      .def_readonly("encode_s", &Counters::encode_s)
      .def_readonly("wait_s", &Counters::wait_s)
      .def_readonly("decode_s", &Counters::decode_s)
      .def_readonly("residual_sq", &Counters::residual_sq)
      .def_readonly("payload_bytes", &Counters::payload_bytes)
      .def_readonly("encoded", &Counters::encoded)
      .def_readonly("energy", &Counters::energy)
      .def_readonly("improved", &Counters::improved);

  // The GIL is let go: an op that holds the session's lock may be waiting for it, to warn.
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<SessionState, std::unique_ptr<SessionState, py::nodelete>>(m, "Session")
      .def("add_segment", &SessionState::add_segment, release)
      .def("add_group", &SessionState::add_group, release)
      .def("add_scattered_bucket", &SessionState::add_scattered_bucket, release)
      .def("set_codec", &SessionState::set_codec, release)
      .def("set_digest", &SessionState::set_digest, release)
      .def_property("seed", &SessionState::seed, &SessionState::set_seed)
      .def("measure", &SessionState::measure, release)
      .def_property_readonly("meter", &SessionState::meter)
      .def("fail", &SessionState::fail, release)
      .def("warn", &SessionState::warn, release)
      .def("on_warning", &SessionState::on_warning)
      .def("stats", [](SessionState& session) {
        SessionState::Stats stats;
        {
          py::gil_scoped_release released;
          stats = session.stats();
        }
        return py::make_tuple(stats.rounds, stats.last, stats.total, stats.segments_of_last);
      });
  m.def("make_session", &make_session);
  m.def("session", &find_session, py::return_value_policy::reference);
  m.attr("SESSION_VERSION") = kSessionVersion;
  m.attr("FIND_SESSION") =
      reinterpret_cast<uintptr_t>(static_cast<FindSession>([](int64_t number) -> Session* { return find_session(number); }));
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  py::enum_<Kind>(m, "Kind")
      .value("none", Kind::kNone)
      .value("fp16", Kind::kFp16)
      .value("bf16", Kind::kBf16)
      .value("adacomp", Kind::kAdaComp)
      .value("qsgd", Kind::kQsgd)
      .value("qsgdinf", Kind::kQsgdInf)
      .value("nuqsgd", Kind::kNuqsgd)
      .value("onebit", Kind::kOneBit)
      .value("topk", Kind::kTopK)
      .value("randomk", Kind::kRandomK)
      .value("cat", Kind::kCat);
  py::enum_<DType>(m, "DType")
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float32", DType::kFloat32)
      .value("float64", DType::kFloat64);
  py::enum_<Coding>(m, "Coding").value("fixed", Coding::kFixed).value("elias", Coding::kElias);
  py::enum_<Scale>(m, "Scale").value("l1", Scale::kL1).value("l2", Scale::kL2);
  py::enum_<Scheme>(m, "Scheme")
      .value("topk", Scheme::kTopK)
      .value("topk+sign", Scheme::kTopKSign)
      .value("stochastic", Scheme::kStochastic);
  py::enum_<CostKind>(m, "CostKind")
      .value("measured", CostKind::kMeasured)
      .value("bits", CostKind::kBits)
      .value("packets", CostKind::kPackets)
      .value("time", CostKind::kTime);

  py::register_exception<MalformedPayload>(m, "PayloadError", PyExc_ValueError).attr("__module__") = "hvd_compress";

  py::class_<Encoded>(m, "Encoded")
      .def_readonly("bytes", &Encoded::bytes)
      .def_readonly("selected", &Encoded::selected)
      .def_readonly("residual_sq", &Encoded::residual_sq)
      .def_readonly("finite", &Encoded::finite)
      .def_readonly("energy", &Encoded::energy)
      .def_readonly("improvement", &Encoded::improvement);
  py::class_<CostModel>(m, "CostModel")
      .def(py::init([](CostKind kind, double c0, double c1, double packet_bytes, double latency, double seconds_per_byte) {
             return CostModel{kind, c0, c1, packet_bytes, latency, seconds_per_byte};
           }),
           py::arg("kind"), py::kw_only(), py::arg("c0") = 0.0, py::arg("c1") = 1.0, py::arg("packet_bytes") = 1500.0,
           py::arg("latency") = 0.0, py::arg("seconds_per_byte") = 0.0)
      .def("of", &CostModel::of);
  py::class_<Step>(m, "Step")
      .def(py::init([](uint64_t seed, double latency, double seconds_per_byte, double explore) {
             return Step{seed, latency, seconds_per_byte, explore};
           }),
           py::arg("seed") = 0, py::arg("latency") = Step().latency, py::arg("seconds_per_byte") = Step().seconds_per_byte,
           py::arg("explore") = 0.0)
      .def_readonly("latency", &Step::latency)
      .def_readonly("seconds_per_byte", &Step::seconds_per_byte)
      .def_readonly("explore", &Step::explore);
  py::class_<Meter>(m, "Meter")
      .def(py::init<std::string>(), py::arg("network") = "")
      .def_property_readonly_static("FASTEST", [](const py::object&) { return Meter::kFastest; })
      .def("said", &Meter::said)
      .def("sent", &Meter::sent)
      .def("finish_round", &Meter::finish_round)
      .def("step", &Meter::step)
      .def_property_readonly("is_fitted", &Meter::is_fitted);
  py::class_<Scope>(m, "Scope")
      .def("add",
           [](Scope& scope, uint32_t index, uintptr_t grad, DType dtype, uintptr_t residual_in, uintptr_t residual_out, size_t n,
              uintptr_t momentum, float weight, float momentum_weight) {
             const Gradient gradient{reinterpret_cast<const void*>(grad), dtype, floats_at(momentum), weight, momentum_weight};
             py::gil_scoped_release release;
             return scope.add(index, gradient, floats_at(residual_in), floats_at(residual_out), n);
           },
           py::arg("index"), py::arg("grad"), py::arg("dtype"), py::arg("residual_in"), py::arg("residual_out"), py::arg("n"),
           py::arg("momentum") = 0, py::arg("weight") = 1.0f, py::arg("momentum_weight") = 0.0f)
      .def("choose", &Scope::choose, py::call_guard<py::gil_scoped_release>())
      .def("encode", [](Scope& scope, uint32_t index, uint64_t seed, uintptr_t out) {
        py::gil_scoped_release release;
        return scope.encode(index, seed, bytes_at(out));
      });
  py::class_<Codec, std::shared_ptr<Codec>>(m, "Codec")
      .def(py::init([](Kind kind, int64_t bin, float c, int bits, int64_t bucket, Coding coding, bool feedback, Scale scale,
                       Scheme scheme, double fraction, bool joint, const CostModel& cost) {
             return create(kind, Options{bin, c, bits, bucket, coding, feedback, scale, scheme, fraction, joint, cost});
           }),
           py::arg("kind"), py::kw_only(), py::arg("bin") = 0, py::arg("c") = 2.0f, py::arg("bits") = 0,
           py::arg("bucket") = 0, py::arg("coding") = Coding::kFixed, py::arg("feedback") = false,
           py::arg("scale") = Scale::kL1, py::arg("scheme") = Scheme::kTopK, py::arg("fraction") = 0.0,
           py::arg("joint") = false, py::arg("cost") = CostModel())
      .def("max_payload", &Codec::max_payload)
      .def("encode",
           [](const Codec& codec, uintptr_t grad, DType dtype, uintptr_t residual_in, uintptr_t residual_out, size_t n,
              const Step& step, uintptr_t out, uintptr_t momentum, float weight, float momentum_weight) {
             const Gradient gradient{reinterpret_cast<const void*>(grad), dtype, floats_at(momentum), weight, momentum_weight};
             py::gil_scoped_release release;
             return codec.encode(gradient, floats_at(residual_in), floats_at(residual_out), n, step, bytes_at(out));
           },
           py::arg("grad"), py::arg("dtype"), py::arg("residual_in"), py::arg("residual_out"), py::arg("n"), py::arg("step"),
           py::arg("out"), py::arg("momentum") = 0, py::arg("weight") = 1.0f, py::arg("momentum_weight") = 0.0f)
      .def("decode_add",
           [](const Codec& codec, uintptr_t payload, size_t bytes, float weight, uintptr_t out, size_t n) {
             py::gil_scoped_release release;
             codec.decode(bytes_at(payload), bytes, weight, true, floats_at(out), n);
           })
      .def_property_readonly("grain", &Codec::grain)
      .def_property_readonly("shares_seed", &Codec::shares_seed)
      .def("scope", &Codec::scope)
      .def("cut", [](const Codec& codec, uintptr_t payload, size_t bytes, size_t n, size_t begin, size_t end, size_t cursor,
                     uintptr_t out) {
        const size_t size = codec.cut(bytes_at(payload), bytes, n, begin, end, cursor, bytes_at(out));
        return py::make_tuple(size, cursor);
      });

  m.def("decode_sum", [](const Codec& codec, const std::vector<std::pair<uintptr_t, size_t>>& payloads, float weight,
                         uintptr_t out, size_t n) {
    const std::vector<Bytes> all = bytes_of(payloads);
    py::gil_scoped_release release;
    decode_sum(codec, all, weight, floats_at(out), n);
  });
  m.def("mix_seed", &mix_seed, py::arg("seed"), py::arg("rank"), py::arg("step"), py::arg("segment"));
  using StandIn = std::array<float, kStandIn>;
  m.def("make_stand_in", [](int64_t rank, int64_t ranks, uint64_t digest) {
    StandIn stand_in;
    make_stand_in(rank, ranks, digest, stand_in.data());
    return stand_in;
  });
  m.def("stand_in_factor", [](const StandIn& reduced, int64_t ranks) { return stand_in_factor(reduced.data(), ranks); });
  m.def("stand_in_agrees", [](const StandIn& reduced, double factor, int64_t ranks, uint64_t digest) {
    return stand_in_agrees(reduced.data(), factor, ranks, digest);
  });
  bind_messages(m);
  bind_chunks(m);
  bind_sessions(m);
  m.def("checksum",
        [](uintptr_t data, size_t bytes) { return checksum(reinterpret_cast<const uint8_t*>(data), bytes); });
}
