// Decode attention over `sinks | packed | tail` on CPUs, the twin of `attend` in reference.py.
//
// The rows of a key/value head and a split of its tokens are a task; tasks run in parallel and are then merged. Packed
// tokens are scored and summed in code space, so that queries and sums are mapped, and no token is.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <functional>

#include "commvq.h"
#include "softmax.h"

namespace kvcache_compress {
namespace {

constexpr int64_t MAX_ROWS = 128;          // of a task
constexpr int64_t MIN_SPLIT_TOKENS = 256;  // shorter splits would cost more to merge than they save
constexpr int64_t TASKS_PER_THREAD = 8;

// A basis of code space, [1 or H, W, D]; none where code space is a head's own space. That of keys is float32 and
// contiguous.
class Basis {
 public:
  explicit Basis(const std::optional<Tensor>& rows) {
    if (!rows) return;
    data_ = static_cast<const char*>(rows->const_data_ptr());
    width_ = rows->size(1), dim_ = rows->size(2);
    head_ = rows->size(0) == 1 ? 0 : rows->stride(0) * rows->element_size();
    row_ = rows->stride(1) * rows->element_size();
    widen_ = conversion(rows->scalar_type()).widen;
  }

  // Query rows [count][D] in code space, [count][W].
  std::vector<float> map(int64_t head, std::vector<float> q, int64_t count) const {
    if (data_ == nullptr) return q;
    std::vector<float> mapped(count * width_);
    score(q.data(), count, reinterpret_cast<const float*>(data_ + head * head_), width_, dim_, mapped.data(), width_);
    return mapped;
  }

  // x[D] += the vector that has these coordinates in code space.
  void add(int64_t head, const std::vector<float>& coordinates, std::vector<float>& x) const {
    if (data_ == nullptr) {
      std::transform(x.begin(), x.end(), coordinates.begin(), x.begin(), std::plus<float>());
      return;
    }
    std::vector<float> axis(dim_);
    for (int64_t w = 0; w < width_; ++w) {
      widen_(data_ + head * head_ + w * row_, dim_, axis.data());
      for (int64_t d = 0; d < dim_; ++d) x[d] += axis[d] * coordinates[w];
    }
  }

 private:
  const char* data_ = nullptr;
  int64_t width_ = 0, dim_ = 0, head_ = 0, row_ = 0;  // the last two in bytes
  void (*widen_)(const void*, int64_t, float*) = nullptr;
};

// The three segments of a layer.
struct Layer {
  const Decoder &packed_k, &packed_v;
  DenseDecoder sink_k, sink_v, tail_k, tail_v;
  int64_t sinks, packed, tail;  // tokens
  Basis k_basis, v_basis;
  const float* mean;  // of the keys, [H, D], or none
};

class Attention {
 public:
  Attention(const Step& step, const Layer& layer, const Tensor& query, double scaling)
      : step_(step),
        layer_(layer),
        query_(query),
        widen_(conversion(query.scalar_type()).widen),
        scale_(static_cast<float>(scaling) * LOG2E) {
    rows_ = std::min(step.rows(), MAX_ROWS);
    row_blocks_ = (step.rows() + rows_ - 1) / rows_;
    const int64_t wanted = TASKS_PER_THREAD * torch::stable::get_num_threads() / blocks();
    const int64_t most = std::max<int64_t>(1, layer.packed / MIN_SPLIT_TOKENS);
    splits_ = layer.packed == 0 ? 0 : std::clamp<int64_t>(wanted, 1, most);
    width_ = std::max(layer.packed_v.width, layer.sink_v.width);
    partials_.resize(tasks() * rows_);
    sums_.reset(new float[partials_.size() * width_]);
    for (size_t i = 0; i < partials_.size(); ++i) partials_[i].sums = sums_.get() + i * width_;
  }

  int64_t blocks() const { return step_.batch * step_.heads * row_blocks_; }
  int64_t tasks() const { return blocks() * (splits_ + 1); }

  // The last split of a block takes the dense tokens, the others share out the packed ones.
  void attend(int64_t task) {
    const Rows rows = rows_of(task / (splits_ + 1));
    const int64_t split = task % (splits_ + 1);
    Partial* partials = &partials_[task * rows_];
    std::fill_n(partials->sums, rows.count * width_, 0.0f);
    std::vector<float> q = queries(rows);
    if (split == splits_) {
      const Run sinks{layer_.sink_k, layer_.sink_v, 0, layer_.sinks, 0};
      const Run tail{layer_.tail_k, layer_.tail_v, 0, layer_.tail, layer_.sinks + layer_.packed};
      attend_run(step_, rows, q.data(), nullptr, sinks, partials);
      attend_run(step_, rows, q.data(), nullptr, tail, partials);
      return;
    }
    const std::vector<float> bias = mean_scores(rows, q);
    q = layer_.k_basis.map(rows.head.head, std::move(q), rows.count);
    const int64_t first = layer_.packed * split / splits_, last = layer_.packed * (split + 1) / splits_;
    const Run run{layer_.packed_k, layer_.packed_v, first, last, layer_.sinks};
    attend_run(step_, rows, q.data(), bias.empty() ? nullptr : bias.data(), run, partials);
  }

  // Adds up the splits of a block into its rows of `out` [B, n, Hq, D]. `logits` [Hq] join the denominator.
  void merge(int64_t block, const float* logits, Tensor& out) const {
    const Rows rows = rows_of(block);
    const auto narrow = conversion(out.scalar_type()).narrow;
    std::vector<float> coordinates(layer_.packed_v.width), result(layer_.sink_v.width);
    for (int64_t r = 0; r < rows.count; ++r) {
      const auto [query_head, query] = query_of(rows, r);
      const float logit = logits == nullptr ? -INF : logits[query_head] * LOG2E;
      const Partial* splits = &partials_[block * (splits_ + 1) * rows_ + r];
      float top = std::max(logit, LOWEST);
      for (int64_t split = 0; split <= splits_; ++split) top = std::max(top, splits[split * rows_].top);
      float total = std::exp2(logit - top);
      std::fill(coordinates.begin(), coordinates.end(), 0.0f);
      std::fill(result.begin(), result.end(), 0.0f);
      for (int64_t split = 0; split <= splits_; ++split) {
        const Partial& one = splits[split * rows_];
        const float share = std::exp2(one.top - top);
        auto& sums = split == splits_ ? result : coordinates;
        for (size_t c = 0; c < sums.size(); ++c) sums[c] += share * one.sums[c];
        total += share * one.total;
      }
      layer_.v_basis.add(rows.head.head, coordinates, result);
      for (float& x : result) x /= std::max(total, std::numeric_limits<float>::min());
      const int64_t row = (rows.head.batch * step_.count + query) * step_.query_heads() + query_head;
      const int64_t bytes = out.size(3) * out.element_size();
      narrow(result.data(), out.size(3), static_cast<char*>(out.mutable_data_ptr()) + row * bytes);
    }
  }

 private:
  Rows rows_of(int64_t block) const {
    const int64_t first = block % row_blocks_ * rows_, head = block / row_blocks_;
    return {{head / step_.heads, head % step_.heads}, first, std::min(rows_, step_.rows() - first)};
  }

  std::pair<int64_t, int64_t> query_of(const Rows& rows, int64_t r) const {
    const int64_t row = rows.first + r;
    return {rows.head.head * step_.groups + row / step_.count, row % step_.count};
  }

  // Query rows times the scale, each as wide as a decoded dense key.
  std::vector<float> queries(const Rows& rows) const {
    const int64_t width = layer_.sink_k.width;
    const auto* data = static_cast<const char*>(query_.const_data_ptr());
    std::vector<float> q(rows.count * width);
    for (int64_t r = 0; r < rows.count; ++r) {
      const auto [head, query] = query_of(rows, r);
      const int64_t at = rows.head.batch * query_.stride(0) + head * query_.stride(1) + query * query_.stride(2);
      widen_(data + at * query_.element_size(), query_.size(3), &q[r * width]);
    }
    for (float& x : q) x *= scale_;
    return q;
  }

  // The product of each query row with the keys' mean; nothing where there is none.
  std::vector<float> mean_scores(const Rows& rows, const std::vector<float>& q) const {
    std::vector<float> scores;
    const int64_t dim = query_.size(3), width = layer_.sink_k.width;
    for (int64_t r = 0; r < rows.count && layer_.mean != nullptr; ++r) {
      const float* mean = layer_.mean + rows.head.head * dim;
      float sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += q[r * width + d] * mean[d];
      scores.push_back(sum);
    }
    return scores;
  }

  const Step& step_;
  const Layer& layer_;
  const Tensor& query_;
  void (*widen_)(const void*, int64_t, float*);
  float scale_;
  int64_t rows_, row_blocks_, splits_, width_;
  std::vector<Partial> partials_;  // [block][split][row]
  std::unique_ptr<float[]> sums_;
};

std::unique_ptr<Decoder> packed_decoder(const std::vector<Tensor>& fields, const std::vector<Tensor>& tables,
                                        const std::vector<int64_t>& form) {
  const std::vector<int64_t> options(form.begin() + 1, form.end());
  switch (form[0]) {
    case 0:
      return std::make_unique<DenseDecoder>(fields[0]);
    case 1:
      return std::make_unique<LevelDecoder>(fields, tables, options);
    case 2:
      return std::make_unique<GroupDecoder>(fields, options[0], options[1], options[2]);
    case 3:
      return std::make_unique<PairDecoder>(fields, tables, options);
    case 4:
      return std::make_unique<TreeDecoder>(fields, tables, options);
    case 5:
      return std::make_unique<AdditiveDecoder>(fields, tables[0]);
    case 6:
      return std::make_unique<ComplexDecoder>(fields, tables);
    case 7:
      return std::make_unique<BitDecoder>(fields);
    default:
      STD_TORCH_CHECK(false, "no such form of packed tokens");
      return nullptr;
  }
}

Tensor attend(const Tensor& query, std::vector<Tensor> k_fields, std::vector<Tensor> k_tables,
              std::vector<int64_t> k_form, std::optional<Tensor> k_basis, std::optional<Tensor> mean,
              std::vector<Tensor> v_fields, std::vector<Tensor> v_tables, std::vector<int64_t> v_form,
              std::optional<Tensor> v_basis, const Tensor& sink_k, const Tensor& sink_v, const Tensor& tail_k,
              const Tensor& tail_v, std::optional<Tensor> mask, std::optional<Tensor> logits, int64_t packed,
              double scaling, double softcap) {
  STD_TORCH_CHECK(query.size(0) == sink_k.size(0), "queries of ", query.size(0), " sequences for a cache of ",
                  sink_k.size(0));
  STD_TORCH_CHECK(query.size(1) % sink_k.size(1) == 0, query.size(1), " query heads for ", sink_k.size(1),
                  " key/value heads");
  STD_TORCH_CHECK(query.size(3) == sink_k.size(3), "queries of ", query.size(3), " numbers for keys of ",
                  sink_k.size(3));
  STD_TORCH_CHECK(!logits || logits->numel() == query.size(1), "one learned sink per query head is needed");
  STD_TORCH_CHECK(
      !k_basis || (k_basis->scalar_type() == torch::headeronly::ScalarType::Float && k_basis->is_contiguous()),
      "a basis of keys must be float32 and contiguous");
  const int64_t heads = sink_k.size(1), sinks = sink_k.size(2), tail = tail_k.size(2);
  Step step{query.size(0),          heads, query.size(1) / heads, query.size(2), sinks + packed + tail,
            float(softcap) * LOG2E, {}};
  if (mask) step.mask.emplace(*mask);
  const auto keys = packed_decoder(k_fields, k_tables, k_form), values = packed_decoder(v_fields, v_tables, v_form);
  const Layer layer{*keys,
                    *values,
                    DenseDecoder(sink_k),
                    DenseDecoder(sink_v),
                    DenseDecoder(tail_k),
                    DenseDecoder(tail_v),
                    sinks,
                    packed,
                    tail,
                    Basis(k_basis),
                    Basis(v_basis),
                    mean ? mean->const_data_ptr<float>() : nullptr};
  Tensor out = torch::stable::new_empty(query, {query.size(0), query.size(2), query.size(1), sink_v.size(3)});
  if (out.numel() == 0) return out;
  const float* sink_logits = logits ? logits->const_data_ptr<float>() : nullptr;
  Attention attention(step, layer, query, scaling);
  torch::stable::parallel_for(0, attention.tasks(), 1, [&](int64_t task, int64_t end) {
    for (; task < end; ++task) attention.attend(task);
  });
  torch::stable::parallel_for(0, attention.blocks(), 1, [&](int64_t block, int64_t end) {
    for (; block < end; ++block) attention.merge(block, sink_logits, out);
  });
  return out;
}

}  // namespace
}  // namespace kvcache_compress

STABLE_TORCH_LIBRARY(kvcache_compress_cpu, m) {
  m.def(
      "attend(Tensor query, Tensor[] k_fields, Tensor[] k_tables, int[] k_form, Tensor? k_basis, Tensor? mean, "
      "Tensor[] v_fields, Tensor[] v_tables, int[] v_form, Tensor? v_basis, Tensor sink_k, Tensor sink_v, "
      "Tensor tail_k, Tensor tail_v, Tensor? mask, Tensor? logits, int packed, float scaling, "
      "float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvcache_compress_cpu, CPU, m) { m.impl("attend", TORCH_BOX(&kvcache_compress::attend)); }
