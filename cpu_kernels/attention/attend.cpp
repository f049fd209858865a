// Decode attention over `sinks | packed | tail` on CPUs, the twin of PyTorch's back end.
//
// A task is a block of rows of a key/value head and a split of its tokens; tasks run in parallel and are then merged by
// log-sum-exp. Packed tokens are scored and summed in code space: queries and sums are mapped, tokens are not.
#include <torch/csrc/stable/ops.h>

#include <functional>

#include "attention/softmax.h"
#include "decode/commvq.h"

namespace kvcache_compress {
namespace {

constexpr int64_t MAX_ROWS = 128;          // per task
constexpr int64_t MIN_SPLIT_TOKENS = 256;  // shorter splits would cost more to merge than they save
constexpr int64_t TASKS_PER_THREAD = 8;

// Basis of code space, [1 or H, W, D]; empty if code space is the head's space. Of keys it is float32 and contiguous.
class Basis {
 public:
  explicit Basis(const View& rows) {
    if (rows.numel() == 0) return;
    data_ = rows.const_data_ptr<char>();
    width_ = rows.size(1), dim_ = rows.size(2);
    head_ = rows.size(0) == 1 ? 0 : rows.stride(0) * rows.bytes;
    row_ = rows.stride(1) * rows.bytes;
    widen_ = widen_from(rows.dtype);
  }

  // Maps query rows [count][D] to code space, [count][W].
  std::vector<float> map(int64_t head, std::vector<float> q, int64_t count) const {
    if (data_ == nullptr) return q;
    std::vector<float> mapped(count * width_);
    score(q.data(), count, reinterpret_cast<const float*>(data_ + head * head_), width_, dim_, mapped.data(), width_);
    return mapped;
  }

  // Adds vectors with these coordinates in code space, [rows][W], to `x` [rows][D].
  void add(int64_t head, const float* coordinates, int64_t rows, std::vector<float>& x) const {
    if (data_ == nullptr) {
      std::transform(x.begin(), x.end(), coordinates, x.begin(), std::plus<float>());
      return;
    }
    constexpr int64_t BLOCK = 32;  // axes
    std::vector<float> axes(BLOCK * dim_);
    for (int64_t w = 0; w < width_; w += BLOCK) {
      const int64_t count = std::min(BLOCK, width_ - w);
      for (int64_t i = 0; i < count; ++i) widen_(data_ + head * head_ + (w + i) * row_, dim_, &axes[i * dim_]);
      add_weighted(coordinates + w, width_, axes.data(), count, dim_, rows, x.data(), dim_);
    }
  }

 private:
  const char* data_ = nullptr;
  int64_t width_ = 0, dim_ = 0, head_ = 0, row_ = 0;  // the last two in bytes
  Widen widen_ = nullptr;
};

template <class Form>
std::unique_ptr<Decoder> decoder(const Side& side) {
  return std::make_unique<Form>(side);
}

// Decoders of packed tokens, in the order of `operands.FORMS`.
constexpr std::unique_ptr<Decoder> (*FORMS[])(const Side&) = {
    decoder<DenseDecoder>, decoder<LevelDecoder>,   decoder<GroupDecoder>,
    decoder<PairDecoder>,  decoder<TreeDecoder>,    decoder<AdditiveDecoder>,
    decoder<BitDecoder>,   decoder<ComplexDecoder>, decoder<DigitDecoder>,
};

// The three segments of a side.
struct Segments {
  explicit Segments(const Side& side)
      : sinks(side.sinks), packed(FORMS[side.form](side)), tail(side.tail), basis(side.basis) {}

  DenseDecoder sinks;
  std::unique_ptr<Decoder> packed;
  DenseDecoder tail;
  Basis basis;  // of the packed tokens' code space
};

// Packed keys [first, last) that are coded with the same statistics.
struct Era {
  Era(const Side& side, int64_t first, int64_t last)
      : segments(side),
        first(first),
        last(last),
        mean(side.mean.numel() > 0 ? side.mean.const_data_ptr<float>() : nullptr) {
    if (dynamic_cast<const DigitDecoder*>(segments.packed.get()) != nullptr) anchored.emplace(side);
  }

  Segments segments;
  int64_t first, last;
  const float* mean;                        // of the keys, [H, D], or null
  std::optional<AnchoredQueries> anchored;  // map of the queries, if they are mapped for each group of keys
};

// Tokens of a sequence: numbers of its segments, its row of the dense tokens, and where its packed tokens are.
struct Sequence {
  int64_t row, sinks, packed, tail;
  Pages pages;
};

struct Layer {
  std::vector<Era> eras;  // of the keys, at least one
  Segments values;
  std::vector<Sequence> sequences;
  int64_t ring;  // slots of a circular tail: token i after the sinks is in slot i % ring

  const Segments& keys() const { return eras.back().segments; }
};

class Attention {
 public:
  Attention(const Step& step, const Layer& layer, const Tensor& query, double scaling)
      : step_(step),
        layer_(layer),
        query_(query),
        widen_(widen_from(query_.dtype)),
        scale_(static_cast<float>(scaling) * LOG2E) {
    rows_ = std::min(step.rows(), MAX_ROWS);
    row_blocks_ = (step.rows() + rows_ - 1) / rows_;
    const int64_t wanted = TASKS_PER_THREAD * torch::stable::get_num_threads() / blocks();
    int64_t longest = 0;
    for (const Sequence& sequence : layer.sequences) longest = std::max(longest, sequence.packed);
    const int64_t most = std::max<int64_t>(1, longest / MIN_SPLIT_TOKENS);
    splits_ = longest == 0 ? 0 : std::clamp<int64_t>(wanted, 1, most);
    width_ = std::max(layer.values.packed->width, layer.values.sinks.width);
    numbers_ = rows_ * width_;
    partials_.resize(tasks() * rows_);
    sums_.reset(new float[tasks() * numbers_]);
  }

  int64_t blocks() const { return step_.batch * step_.heads * row_blocks_; }
  int64_t tasks() const { return blocks() * (splits_ + 1); }

  // Attends to one split of a block: the last split has the dense tokens, the others share the packed ones.
  void attend(int64_t task) {
    const Rows rows = rows_of(task / (splits_ + 1));
    const Sequence& sequence = layer_.sequences[rows.head.batch];
    const int64_t split = task % (splits_ + 1);
    Partial* partials = &partials_[task * rows_];
    float* sums = &sums_[task * numbers_];
    std::fill_n(sums, numbers_, 0.0f);
    std::vector<float> q = queries(rows);
    if (split == splits_) {
      const Run sinks{layer_.keys().sinks, layer_.values.sinks, 0, sequence.sinks, 0};
      const int64_t first = sequence.pages.blocks == nullptr ? 0 : sequence.packed % layer_.ring;
      const int64_t ahead = std::min(sequence.tail, layer_.ring - first), position = sequence.sinks + sequence.packed;
      const Run tail{layer_.keys().tail, layer_.values.tail, first, first + ahead, position - first};
      const Run wrapped{layer_.keys().tail, layer_.values.tail, 0, sequence.tail - ahead, position + ahead};
      const Rows dense{{sequence.row, rows.head.head}, rows.first, rows.count};
      attend_run(step_, dense, {q.data()}, sinks, partials, sums, width_);
      attend_run(step_, dense, {q.data()}, tail, partials, sums, width_);
      attend_run(step_, dense, {q.data()}, wrapped, partials, sums, width_);
      return;
    }
    const auto& anchored = layer_.eras.back().anchored;
    const int64_t unit = anchored ? anchored->group : 1, units = sequence.packed / unit;
    const int64_t first = units * split / splits_ * unit, last = units * (split + 1) / splits_ * unit;
    for (const Era& era : layer_.eras) {
      const Run run{*era.segments.packed,     *layer_.values.packed, std::max(first, era.first),
                    std::min(last, era.last), sequence.sinks,        sequence.pages};
      if (run.first >= run.last) continue;
      const std::vector<float> bias = mean_scores(era, rows, q),
                               mapped = era.segments.basis.map(rows.head.head, q, rows.count);
      attend_run(step_, rows,
                 {mapped.data(), bias.empty() ? nullptr : bias.data(), era.anchored ? &*era.anchored : nullptr}, run,
                 partials, sums, width_);
    }
  }

  // Merges the splits of a block into its rows of `out` [B, n, Hq, dim]; the logits `s_aux` [Hq] join the denominator.
  void merge(int64_t block, const float* s_aux, float* out, int64_t dim) const {
    const Rows rows = rows_of(block);
    std::vector<float> shares((splits_ + 1) * rows.count), totals(rows.count);
    for (int64_t r = 0; r < rows.count; ++r) {
      const float logit = s_aux == nullptr ? -INF : s_aux[query_of(rows, r).first] * LOG2E;
      const Partial* splits = &partials_[block * (splits_ + 1) * rows_ + r];
      float top = std::max(logit, LOWEST);
      for (int64_t split = 0; split <= splits_; ++split) top = std::max(top, splits[split * rows_].top);
      totals[r] = std::exp2(logit - top);
      for (int64_t split = 0; split <= splits_; ++split) {
        const float share = std::exp2(splits[split * rows_].top - top);
        shares[split * rows.count + r] = share;
        totals[r] += share * splits[split * rows_].total;
      }
    }
    const std::vector<float> packed = packed_sums(block, rows, shares.data());
    const float* dense = &sums_[(block * (splits_ + 1) + splits_) * numbers_];
    const int64_t width = layer_.values.sinks.width;
    std::vector<float> result(rows.count * width);
    for (int64_t r = 0; r < rows.count; ++r) {
      const float share = shares[splits_ * rows.count + r];
      for (int64_t d = 0; d < width; ++d) result[r * width + d] = share * dense[r * width_ + d];
    }
    layer_.values.basis.add(rows.head.head, packed.data(), rows.count, result);
    for (int64_t r = 0; r < rows.count; ++r) {
      const float total = std::max(totals[r], std::numeric_limits<float>::min());
      const auto [query_head, query] = query_of(rows, r);
      const int64_t row = (rows.head.batch * step_.count + query) * step_.query_heads() + query_head;
      for (int64_t d = 0; d < dim; ++d) out[row * dim + d] = result[r * width + d] / total;
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

  // Sums of a block's packed values over its splits, in code space, [rows][width]; `shares` is [splits + 1][rows].
  std::vector<float> packed_sums(int64_t block, const Rows& rows, const float* shares) const {
    const int64_t width = layer_.values.packed->width;
    std::vector<float> packed(rows.count * width);
    for (int64_t split = 0; split < splits_; ++split, shares += rows.count) {
      const float* sums = &sums_[(block * (splits_ + 1) + split) * numbers_];
      for (int64_t r = 0; r < rows.count; ++r) {
        for (int64_t c = 0; c < width; ++c) packed[r * width + c] += shares[r] * sums[r * width_ + c];
      }
    }
    return packed;
  }

  // Query rows times the scale, padded to the width of a decoded dense key.
  std::vector<float> queries(const Rows& rows) const {
    const int64_t width = layer_.keys().sinks.width;
    const auto* data = query_.const_data_ptr<char>();
    std::vector<float> q(rows.count * width);
    for (int64_t r = 0; r < rows.count; ++r) {
      const auto [head, query] = query_of(rows, r);
      const int64_t at = rows.head.batch * query_.stride(0) + head * query_.stride(1) + query * query_.stride(2);
      widen_(data + at * query_.bytes, query_.size(3), &q[r * width]);
    }
    for (float& x : q) x *= scale_;
    return q;
  }

  // Product of each query row with the keys' mean; empty without a mean.
  std::vector<float> mean_scores(const Era& era, const Rows& rows, const std::vector<float>& q) const {
    std::vector<float> scores;
    const int64_t dim = query_.size(3), width = layer_.keys().sinks.width;
    for (int64_t r = 0; r < rows.count && era.mean != nullptr; ++r) {
      const float* mean = era.mean + rows.head.head * dim;
      float sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += q[r * width + d] * mean[d];
      scores.push_back(sum);
    }
    return scores;
  }

  const Step& step_;
  const Layer& layer_;
  const View query_;
  Widen widen_;
  float scale_;
  int64_t rows_, row_blocks_, splits_, width_;
  int64_t numbers_;                // sums of a task, [row][width] or [code][lane]
  std::vector<Partial> partials_;  // [block][split][row]
  std::unique_ptr<float[]> sums_;  // [block][split][numbers]
};

// Words of a description: the number of the form; how many options and fields; the options; and views of all tensors,
// in the order of the members of `Side`.
Tensor describe(int64_t form, const std::vector<int64_t>& options, int64_t fields, const std::vector<Tensor>& tensors) {
  const auto count = static_cast<int64_t>(options.size() + tensors.size() * Side::WORDS) + Side::HEAD;
  Tensor description = torch::stable::new_empty(tensors[0], {count}, ScalarType::Long);
  auto* words = description.mutable_data_ptr<int64_t>();
  *words++ = form, *words++ = static_cast<int64_t>(options.size()), *words++ = fields;
  words = std::copy(options.begin(), options.end(), words);
  for (const Tensor& x : tensors) {
    const View view(x);
    std::memcpy(words, &view, sizeof view);
    words += Side::WORDS;
  }
  return description;
}

Tensor attend(const Tensor& query, const std::vector<Tensor>& key_sides, const std::vector<int64_t>& starts,
              const Tensor& value_side, std::optional<Tensor> mask, std::optional<Tensor> s_aux, int64_t packed,
              int64_t tail, std::optional<Tensor> pages, int64_t page_tokens, double scaling, double softcap) {
  const Side keys(key_sides.back()), values(value_side);
  const int64_t batch = query.size(0), heads = keys.sinks.size(1), sinks = keys.sinks.size(2);
  STD_TORCH_CHECK(batch == (pages ? pages->size(0) : keys.sinks.size(0)), "queries of ", batch,
                  " sequences for a cache of ", pages ? pages->size(0) : keys.sinks.size(0));
  STD_TORCH_CHECK(query.size(1) % heads == 0, query.size(1), " query heads for ", heads, " key/value heads");
  STD_TORCH_CHECK(query.size(3) == keys.sinks.size(3), "queries of ", query.size(3), " numbers for keys of ",
                  keys.sinks.size(3));
  Layer layer{{}, Segments(values), {}, keys.tail.size(2)};
  for (int64_t b = 0; b < batch; ++b) {
    if (!pages) {
      layer.sequences.push_back({b, sinks, packed, tail, {}});
      continue;
    }
    const int64_t* row = pages->const_data_ptr<int64_t>() + b * pages->size(1);
    layer.sequences.push_back({row[0], row[1], row[2], row[3], {row + 4, page_tokens}});
    packed = std::max(packed, row[2]);
  }
  // The only query of a sequence in pages sees all of its tokens.
  const int64_t tokens = pages ? std::numeric_limits<int64_t>::max() : sinks + packed + tail;
  Step step{batch, heads, query.size(1) / heads, query.size(2), tokens, float(softcap) * LOG2E, {}};
  if (mask) step.mask.emplace(*mask);
  layer.eras.reserve(starts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    layer.eras.emplace_back(Side(key_sides[i]), starts[i], i + 1 < starts.size() ? starts[i + 1] : packed);
  }
  const int64_t dim = values.sinks.size(3);
  Tensor out = torch::stable::new_empty(query, {batch, query.size(2), query.size(1), dim}, ScalarType::Float);
  if (out.numel() == 0) return out;
  auto* out_data = out.mutable_data_ptr<float>();
  const float* s_aux_data = s_aux ? s_aux->const_data_ptr<float>() : nullptr;
  Attention attention(step, layer, query, scaling);
  torch::stable::parallel_for(0, attention.tasks(), 1, [&](int64_t task, int64_t end) {
    for (; task < end; ++task) attention.attend(task);
  });
  torch::stable::parallel_for(0, attention.blocks(), 1, [&](int64_t block, int64_t end) {
    for (; block < end; ++block) attention.merge(block, s_aux_data, out_data, dim);
  });
  return out;
}

}  // namespace

KVCACHE_COMPRESS_OPERATOR(describe, "(int form, int[] options, int fields, Tensor[] tensors) -> Tensor")
KVCACHE_COMPRESS_OPERATOR(
    attend,
    "(Tensor query, Tensor[] keys, int[] starts, Tensor values, Tensor? mask, Tensor? s_aux, int packed, int tail, "
    "Tensor? pages, int page_tokens, float scaling, float softcap) -> Tensor")

}  // namespace kvcache_compress
