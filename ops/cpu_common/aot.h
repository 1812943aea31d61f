// What MindSpore's aot route of ops.Custom looks for in a library, for an operator `Op`:
//   OpInferShape(ndims, shapes, extra)     the shapes of the outputs; a dimension may be -1 (unknown), a rank -2
//   OpInferType(types, extra)              the types of the outputs
//   Op(count, data, ndims, shapes, dtypes, stream, extra)   inputs, then outputs
// MindSpore turns an exception from them into a Python RuntimeError with the same text.
// All that the operators need are tensors: no attribute is read from AotExtra and no workspace requested. So
// MindSpore's header, which pulls in its core headers, is not needed, and its layout may change.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_common/element.h"

namespace mindlora {

constexpr int64_t kMaxRank = 256;

[[noreturn]] inline void Refuse(const char* op, const std::string& why)
{
    throw std::runtime_error(std::string("mindlora ") + op + ": " + why);
}

// The shapes of one call. The checks let unknown dimensions pass, and are repeated when all are known.
class Shapes {
public:
    Shapes(const char* op, int* ndims, int64_t** shapes) : op_(op), ndims_(ndims), shapes_(shapes) {}

    bool RankKnown(int i) const { return !(ndims_[i] == 1 && shapes_[i][0] == -2); }

    // The number of dimensions, or -1 where it is not known.
    int Rank(int i) const { return RankKnown(i) ? ndims_[i] : -1; }

    // A dimension, or -1 where it is not known.
    int64_t At(int i, int axis) const { return RankKnown(i) ? shapes_[i][axis] : -1; }

    void CheckRank(int i, const char* name, int rank) const
    {
        if (RankKnown(i) && ndims_[i] != rank) {
            Refuse(op_,
                std::string(name) + " has " + std::to_string(ndims_[i]) + " dimensions: it must have " +
                    std::to_string(rank) + ".");
        }
    }

    // A tensor of tokens: [T, width] or, as MindFormers' networks have it, [B, T, width].
    void CheckTokens(int i, const char* name) const
    {
        if (RankKnown(i) && ndims_[i] != 2 && ndims_[i] != 3) {
            Refuse(op_, std::string(name) + " has " + std::to_string(ndims_[i]) + " dimensions: it must have 2 or 3.");
        }
    }

    // The number of tokens of such a tensor, or -1.
    int64_t Tokens(int i) const
    {
        if (!RankKnown(i)) return -1;
        int64_t tokens = 1;
        for (int axis = 0; axis + 1 < ndims_[i]; ++axis) {
            if (shapes_[i][axis] < 0) return -1;
            tokens *= shapes_[i][axis];
        }
        return tokens;
    }

    // The length of its last axis but one: the tokens of one row of a batch.
    int64_t BeforeLast(int i) const { return shapes_[i][ndims_[i] - 2]; }

    // Its width, or -1.
    int64_t Width(int i) const { return RankKnown(i) ? shapes_[i][ndims_[i] - 1] : -1; }

    // Two dimensions that must be equal.
    void CheckSame(const char* what, int64_t first, int64_t second) const
    {
        if (first >= 0 && second >= 0 && first != second) {
            Refuse(op_,
                std::string(what) + " is " + std::to_string(first) + " in one input and " + std::to_string(second) +
                    " in another.");
        }
    }

    void CheckLoraRank(int64_t rank) const
    {
        if (rank == 0 || rank > kMaxRank) {
            Refuse(op_, "rank is " + std::to_string(rank) + ": it must be 1 to " + std::to_string(kMaxRank) + ".");
        }
    }

    // A [r, K] and B [N, r], with K and N as the other inputs have them.
    void CheckPair(int a, int b, int64_t in, int64_t out) const
    {
        CheckRank(a, "A", 2);
        CheckRank(b, "B", 2);
        CheckSame("K", in, At(a, 1));
        CheckSame("N", out, At(b, 0));
        CheckSame("the rank", At(a, 0), At(b, 1));
        CheckLoraRank(At(a, 0));
    }

    // pool [slots, rows, K + N], ranks [slots] and scales [slots].
    void CheckSlots(int pool, int ranks, int scales) const
    {
        CheckRank(pool, "pool", 3);
        CheckRank(ranks, "ranks", 1);
        CheckRank(scales, "scales", 1);
        CheckSame("the number of slots", At(pool, 0), At(ranks, 0));
        CheckSame("the number of slots", At(pool, 0), At(scales, 0));
    }

    // The same with max_rank rows of one pair.
    void CheckPool(int pool, int ranks, int scales) const
    {
        CheckSlots(pool, ranks, scales);
        CheckLoraRank(At(pool, 1));
    }

    // The shape of input i with another last dimension.
    std::vector<int64_t> OfWithLast(int i, int64_t last) const
    {
        std::vector<int64_t> shape = Of(i);
        if (RankKnown(i) && !shape.empty()) shape.back() = last;
        return shape;
    }

    // A vector with one element for each of so many tokens, or more.
    void CheckEnough(int i, const char* name, int64_t tokens) const
    {
        CheckRank(i, name, 1);
        if (tokens >= 0 && At(i, 0) >= 0 && At(i, 0) < tokens) {
            Refuse(op_,
                std::string(name) + " has " + std::to_string(At(i, 0)) +
                    " elements: it must have one for each of the " + std::to_string(tokens) + " tokens, or more.");
        }
    }

    // The shape of input i, for an output of the same shape.
    std::vector<int64_t> Of(int i) const { return std::vector<int64_t>(shapes_[i], shapes_[i] + ndims_[i]); }

private:
    const char* op_;
    int* ndims_;
    int64_t** shapes_;
};

inline void CheckDtype(const char* op, const char* name, const char* dtype, const char* wanted)
{
    if (std::string(dtype) != wanted) {
        Refuse(op, std::string(name) + " is " + dtype + ": it must be " + wanted + ".");
    }
}

// Calls f with a value of the element type that `dtype` names.
template <class F>
void WithElement(const char* op, const std::string& dtype, F f)
{
    if (dtype == "float32") {
        f(float());
    } else if (dtype == "float16") {
        f(float16());
    } else if (dtype == "bfloat16") {
        f(bfloat16());
    } else {
        Refuse(op, "dtype is " + dtype + ": it must be float32, float16 or bfloat16.");
    }
}

}  // namespace mindlora

// MindSpore's own class, of which only the address is used here.
class AotExtra;
#define MINDLORA_EXPORT extern "C" __attribute__((visibility("default")))
