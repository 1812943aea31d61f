// Kernels of attention: positions, the cache, and the attention of each request to its own tokens.
#include <cmath>
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "internal_kernels.h"

namespace {

using internal_kernels::Kernel;
using internal_kernels::View;
using internal_kernels::Views;

// Inputs: q, k [tokens, heads x d], cos, sin [tokens, d], lengths. The halves of a head turn against each other, or
// neighbours do where the format is odd.
bool ApplyRotaryPosEmb(const Views& in, const Views& out)
{
    const bool neighbours = internal_kernels::RotaryFormat() % 2 == 1;
    const View& cos = in[2];
    const View& sin = in[3];
    const int64_t d = cos.shape.back();
    std::vector<double> head(d);
    for (int side = 0; side < 2; side++) {
        const int64_t heads = in[side].shape.back() / d;
        for (int64_t first = 0; first < in[side].count; first += d) {
            const int64_t token = first / (heads * d);
            for (int64_t i = 0; i < d; i++) head[i] = in[side].Get(first + i);
            for (int64_t i = 0; i < d; i++) {
                const int64_t step = neighbours ? 1 : d / 2;
                const double other = i / step % 2 == 0 ? -head[i + step] : head[i - step];
                out[side].Set(first + i, head[i] * cos.Get(token * d + i) + other * sin.Get(token * d + i));
            }
        }
    }
    return true;
}

// Inputs: key, value [tokens, width], both caches [slots, width], the slot of each token; below 0: none.
bool ReshapeAndCache(const Views& in, const Views&)
{
    const View& slots = in[4];
    for (int side = 0; side < 2; side++) {
        const size_t width = in[side].count / slots.count * in[side].Bytes();
        for (int64_t token = 0; token < slots.count; token++) {
            const auto slot = static_cast<int64_t>(slots.Get(token));
            if (slot >= 0) std::memcpy(in[2 + side].data + slot * width, in[side].data + token * width, width);
        }
    }
    return true;
}

// Attention of one head to the keys and values of one request.
class Head {
public:
    // query: where the head's query begins; group: the head of the cache that it reads.
    Head(const Views& in, int64_t request, int64_t query, int64_t group)
        : in_(in), request_(request), query_(query), group_(group)
    {}

    // Softmax(q K^T / sqrt(d) + mask) V over the first `seen` tokens.
    std::vector<double> Attend(int64_t seen, const View* mask, int64_t maskRow) const
    {
        const int64_t d = in_[1].shape[3];
        std::vector<double> weights(seen), result(d);
        for (int64_t token = 0; token < seen; token++) {
            const int64_t at = Place(token);
            for (int64_t i = 0; i < d; i++) weights[token] += in_[0].Get(query_ + i) * in_[1].Get(at + i);
            weights[token] /= std::sqrt(static_cast<double>(d));
            if (mask != nullptr) weights[token] += mask->Get(maskRow * mask->shape.back() + token);
        }
        const double top = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - top);
        for (int64_t token = 0; token < seen; token++) {
            const int64_t at = Place(token);
            for (int64_t i = 0; i < d; i++) result[i] += weights[token] / sum * in_[2].Get(at + i);
        }
        return result;
    }

private:
    // Where the cache [blocks, block size, heads, d] has this head of a token.
    int64_t Place(int64_t token) const
    {
        const std::vector<int64_t>& cache = in_[1].shape;
        const int64_t width = in_[3].shape[1], blockSize = cache[1];
        const auto block = static_cast<int64_t>(in_[3].Get(request_ * width + token / blockSize));
        return ((block * blockSize + token % blockSize) * cache[2] + group_) * cache[3];
    }

    const Views& in_;
    int64_t request_, query_, group_;
};

// Inputs: query [tokens, heads, d] or [1, tokens, heads x d], both caches, block tables [requests, blocks]; a mask
// where several tokens of a request are computed at once. The lengths come from the graph's inputs.
bool PagedAttention(const Views& in, const Views& out)
{
    const int64_t groups = in[1].shape[2], d = in[1].shape[3];
    const auto& query = in[0].shape;
    const int64_t heads = query.back() == d ? query[query.size() - 2] : query.back() / d;
    const int64_t tokens = in[0].count / (heads * d);
    const std::vector<int64_t> contexts = internal_kernels::Lengths("batch_valid_length");
    std::vector<int64_t> counts = internal_kernels::Lengths("q_seq_lens");
    if (contexts.empty()) {
        std::fprintf(stderr, "stand-in for CANN: PagedAttention has no graph input batch_valid_length\n");
        return false;
    }
    if (counts.empty()) counts.assign(contexts.size(), 1);
    const View* mask = nullptr;
    for (size_t i = 4; i < in.size(); i++) {
        const bool isMask = in[i].count > 0 && in[i].data != nullptr && in[i].shape.size() >= 2;
        if (isMask && in[i].type != device::kInt32) mask = &in[i];
    }
    int64_t token = 0;
    for (size_t request = 0; request < contexts.size(); request++) {
        for (int64_t computed = 0; computed < counts[request] && token < tokens; computed++, token++) {
            const int64_t all = contexts[request];
            const int64_t seen = mask != nullptr ? all : all - counts[request] + computed + 1;
            for (int64_t head = 0; head < heads; head++) {
                const int64_t first = (token * heads + head) * d;
                const Head one(in, static_cast<int64_t>(request), first, head / (heads / groups));
                const std::vector<double> values = one.Attend(seen, mask, token);
                for (int64_t i = 0; i < d; i++) out[0].Set(first + i, values[i]);
            }
        }
    }
    return true;
}

const Kernel kernels[] = {
    {"ApplyRotaryPosEmb", ApplyRotaryPosEmb},
    {"PagedAttention", PagedAttention},
    {"ReshapeAndCache", ReshapeAndCache},
};

}  // namespace
