// rotary_embedding on a CPU: y = x cos + rotate_half(x) sin, for each head, and its gradient. Meaning and shapes:
// ../README.md.
#include <omp.h>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL "rotary_embedding/cpu/rotary_embedding_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "rotary_embedding";
enum { kX, kCos, kSin, kY };

void Check(const Shapes& s)
{
    s.CheckTokens(kX, "x");
    s.CheckRank(kCos, "cos", 2);
    s.CheckRank(kSin, "sin", 2);
    const int64_t positions = s.RankKnown(kX) ? s.BeforeLast(kX) : -1;
    s.CheckSame("the number of tokens", positions, s.At(kCos, 0));
    s.CheckSame("the number of tokens", positions, s.At(kSin, 0));
    s.CheckSame("D", s.At(kCos, 1), s.At(kSin, 1));
    const int64_t size = s.At(kCos, 1), width = s.Width(kX);
    if (size == 0 || (size > 0 && size % 2 != 0)) {
        Refuse(kOp, "D is " + std::to_string(size) + " in cos: it must be even and at least 2.");
    }
    if (size > 0 && width >= 0 && width % size != 0) {
        Refuse(kOp,
            "x has " + std::to_string(width) + " numbers a token: that is not a multiple of D, which is " +
                std::to_string(size) + " in cos.");
    }
}

template <bool kGrad>
int Run(void** data, int* ndims, int64_t** shapes, const char** dtypes)
{
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "sin", dtypes[kSin], dtypes[kCos]);
    const int64_t size = s.At(kCos, 1), heads = s.Width(kX) / size;
    WithElement(kOp, dtypes[kX], [&](auto x_element) {
        using X = decltype(x_element);
        WithElement(kOp, dtypes[kCos], [&](auto cos_element) {
            using C = decltype(cos_element);
            MINDLORA_DISPATCH(Rotate<kGrad>, static_cast<const X*>(data[kX]), static_cast<const C*>(data[kCos]),
                static_cast<const C*>(data[kSin]), s.Tokens(kX), s.At(kCos, 0), heads, size / 2, omp_get_max_threads(),
                static_cast<X*>(data[kY]));
        });
    });
    return 0;
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> RotaryEmbeddingInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kX);
}

MINDLORA_EXPORT int RotaryEmbeddingInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RotaryEmbedding(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    return mindlora::Run<false>(data, ndims, shapes, dtypes);
}

MINDLORA_EXPORT std::vector<int64_t> RotaryEmbeddingGradInferShape(int* ndims, int64_t** shapes, AotExtra* extra)
{
    return RotaryEmbeddingInferShape(ndims, shapes, extra);
}

MINDLORA_EXPORT int RotaryEmbeddingGradInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RotaryEmbeddingGrad(
    int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    return mindlora::Run<true>(data, ndims, shapes, dtypes);
}
