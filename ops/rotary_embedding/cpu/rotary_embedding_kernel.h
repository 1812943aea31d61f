// The kernels of rotary_embedding. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "rotary_embedding/cpu/rotate_token.h"

// The tables have a row for each of `positions` tokens, after which the next row of the batch begins.
template <bool kGrad, class X, class C>
static void Rotate(const X* x, const C* cos, const C* sin, int64_t tokens, int64_t positions, int64_t heads,
    int64_t half, int threads, X* y)
{
    const int64_t width = heads * 2 * half;
    // Below this many numbers to start threads would cost more than they save.
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * width > 32768)
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = t % positions * 2 * half;
        RotateToken<kGrad>(x + t * width, cos + at, sin + at, heads, half, y + t * width);
    }
}
