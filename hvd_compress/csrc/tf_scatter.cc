// TensorFlow's ops of a scatter-gather (see scatter.h), between those of tf_ops.cc.
//
//   Pack --> Scatter --> [Horovod's alltoall] --> Reduce --> [Horovod's allgather] --> Unpack
#include "message.h"
#include "random.h"
#include "scatter.h"
#include "tf_ops.h"

namespace hvd_compress {
namespace {

REGISTER_OP("HvdCompressScatter")
    .HVD_SESSION_ATTRS.Attr("bucket: int")
    .Input("residual: resource")
    .Input("message: uint8")
    .Input("world: int32")
    .Output("messages: uint8")
    .Output("lengths: int32")
    .SetIsStateful()
    .SetShapeFn(vectors)
    .Doc(R"doc(
Makes of a bucket's message one for each rank, of its chunk.

world: The own rank and the number of ranks.
messages: One behind the other.
lengths: Of each, in bytes.
)doc");

REGISTER_OP("HvdCompressReduce")
    .HVD_SESSION_ATTRS.Attr("bucket: int")
    .Attr("members: list(int)")
    .Attr("N: int >= 1")
    .Input("received: uint8")
    .Input("world: int32")
    .Input("piece_residual: N * resource")
    .Input("state: N * resource")
    .Output("message: uint8")
    .SetIsStateful()
    .SetShapeFn(vectors)
    .Doc(R"doc(
Takes the mean of what all ranks sent of the own chunk, and encodes it again.

received: Their messages.
world: The own rank and the number of ranks.
members: Of the bucket.
piece_residual: Of each member, as for Encode; of the own piece it is replaced by what was lost.
state: Of each member, as for Encode.
message: Its bytes. Where what was received is damaged it says so, since the other ranks wait for it.
)doc");

class ScatterOp final : public SessionOp {
 public:
  explicit ScatterOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
  }

 private:
  void run(OpKernelContext* context) override {
    const Tensor& message = context->input(1);
    const auto world = context->input(2).flat<int32_t>();
    const auto chunks = session_->chunks(group_, bucket_, static_cast<size_t>(world(1)));
    Tensor messages = allocate(context, tensorflow::DT_UINT8, static_cast<int64_t>(chunks->split_room()));
    const auto split = chunks->split(message.flat<uint8_t>().data(), static_cast<size_t>(message.NumElements()),
                                     messages.flat<uint8_t>().data());
    Tensor* lengths;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({static_cast<int64_t>(split.size())}), &lengths));
    int64_t all = 0;
    for (size_t owner = 0; owner < split.size(); ++owner) {
      lengths->flat<int32_t>()(static_cast<int64_t>(owner)) = static_cast<int32_t>(split[owner]);
      if (static_cast<int32_t>(owner) != world(0)) count(messages, all, split[owner]);
      all += static_cast<int64_t>(split[owner]);
    }
    context->set_output(0, messages.Slice(0, all));
  }

  void count(const Tensor& messages, int64_t at, size_t bytes) {
    size_t head = kHeaderBytes;
    const Message message = read_messages(messages.flat<uint8_t>().data() + at, bytes, 1)[0];
    for (const Entry& entry : message.entries) {
      session_->scattered(group_, entry.index, head + kEntryBytes + entry.bytes);
      head = 0;
    }
  }

  int64_t bucket_ = -1;
};

class ReduceOp final : public SessionOp {
 public:
  explicit ReduceOp(OpKernelConstruction* context) : SessionOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("members", &members_));
  }

 private:
  void run(OpKernelContext* context) override {
    const auto world = context->input(1).flat<int32_t>();
    const auto rank = static_cast<size_t>(world(0));
    const auto chunks = session_->chunks(group_, bucket_, static_cast<size_t>(world(1)));
    const auto& pieces = chunks->pieces(rank);
    Tensor message = allocate(context, tensorflow::DT_UINT8, static_cast<int64_t>(chunks->message_room(rank)));
    uint8_t* out = message.flat<uint8_t>().data();
    RefVar first = variable_of(context, 2 + static_cast<int>(members_.size()), tensorflow::DT_DOUBLE);
    uint64_t step = 0;
    {
      const tensorflow::tf_shared_lock lock(*first->mu());
      step = static_cast<uint64_t>(State::read(first.get()).encodings);
    }
    size_t end = kHeaderBytes;
    uint32_t flags = 0;
    try {
      const Tensor& received = context->input(0);
      const uint8_t* data = received.flat<uint8_t>().data();
      const auto messages = session_->received(group_, bucket_, data, static_cast<size_t>(received.NumElements()));
      for (size_t i = 0; i < pieces.size(); ++i) {
        std::vector<Bytes> payloads;
        for (const Message& each : messages) {
          if (each.entries.size() != pieces.size() || each.entries[i].index != pieces[i].index) {
            throw MalformedPayload("a message has other segments than were expected");
          }
          if (each.entries[i].bytes > 0) payloads.emplace_back(data + each.entries[i].offset, each.entries[i].bytes);
        }
        const size_t bytes = payloads.empty() ? 0 : encode(context, pieces[i], payloads, messages.size(), step, &flags,
                                                           out + end + kEntryBytes);
        write_entry(out + end, pieces[i].index, bytes);
        end += kEntryBytes + bytes;
        session_->scattered(group_, pieces[i].index,
                            (messages.size() - 1) * ((i == 0 ? kHeaderBytes : 0) + kEntryBytes + bytes));
      }
    } catch (const MalformedPayload&) {
      end = kHeaderBytes;
      flags = kDamaged;
    }
    const uint64_t digest = session_->task(group_, members_[0]).digest;
    context->set_output(0, message.Slice(0, static_cast<int64_t>(finish_message(out, end, {flags, digest, step}))));
    session_->sent(group_, bucket_, members_[0], true);
  }

  size_t encode(OpKernelContext* context, const Piece& piece, const std::vector<Bytes>& payloads, size_t ranks, uint64_t step,
                uint32_t* flags, uint8_t* out) {
    const auto start = std::chrono::steady_clock::now();
    const auto row = std::find(members_.begin(), members_.end(), piece.index) - members_.begin();
    const Task task = session_->task(group_, piece.index);
    const size_t n = piece.end - piece.begin;
    Tensor mean = allocate(context, tensorflow::DT_FLOAT, static_cast<int64_t>(n));
    const auto rank = static_cast<uint64_t>(context->input(1).flat<int32_t>()(0));
    // Another seed than of any rank's own gradient.
    Step again = task.measured;
    again.seed = mix_seed(task.seed, ranks + rank, step, static_cast<uint64_t>(task.segment));
    const auto run = [&](const float* residual_in, float* residual_out) {
      return encode_again(*task.codec, payloads, 1.0f / static_cast<float>(ranks), residual_in, residual_out, n, again,
                          mean.flat<float>().data(), out);
    };
    Encoded encoded;
    std::function<void()> undo;
    if (task.has_residual) {
      note_begin(context, 2 + static_cast<int>(members_.size() + row), piece.begin);
      const std::shared_ptr<Var> residual = shared(variable_of(context, 2 + static_cast<int>(row), tensorflow::DT_FLOAT));
      const auto before = kept_of(session_, task.segment)->piece;
      const mutex_lock lock(*residual->mu());
      encoded = encode_with(context, residual.get(), before.get(), static_cast<int64_t>(n), run);
      undo = undo_of(residual, before);
    } else {
      encoded = run(nullptr, nullptr);
    }
    if (!encoded.finite) *flags |= kNonFinite;
    session_->encoded_again(group_, piece.index, seconds_since(start), std::move(undo));
    return encoded.bytes;
  }

  static void note_begin(OpKernelContext* context, int input, size_t begin) {
    RefVar variable = variable_of(context, input, tensorflow::DT_DOUBLE);
    const mutex_lock lock(*variable->mu());
    State state = State::read(variable.get());
    if (state.piece_begin == static_cast<double>(begin)) return;
    state.piece_begin = static_cast<double>(begin);
    state.write(context, variable.get());
  }

  int64_t bucket_ = -1;
  std::vector<int64_t> members_;
};

REGISTER_KERNEL_BUILDER(Name("HvdCompressScatter").Device(DEVICE_CPU), ScatterOp);
REGISTER_KERNEL_BUILDER(Name("HvdCompressReduce").Device(DEVICE_CPU), ReduceOp);

}  // namespace
}  // namespace hvd_compress
