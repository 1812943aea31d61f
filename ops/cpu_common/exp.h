// e^x, and what a softmax needs beside it. Included by kernels, once in the namespace of each instruction set: no
// include guard.

MINDLORA_INLINE Vec Splat(float value) { return value - Vec{}; }

MINDLORA_INLINE Vec Larger(Vec a, Vec b) { return a > b ? a : b; }

// e^x for x up to 0: 1 at 0, and 0 below -87. Polynomial: Cephes, expf (Moshier).
MINDLORA_INLINE Vec Exp(Vec x)
{
    const Vec round = Splat(12582912.0f);  // 1.5 * 2^23: what is added to it loses its fraction
    const Vec n = (x * 1.44269504f + round) - round;
    const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Vec power = reinterpret_cast<Vec>((__builtin_convertvector(n, Lanes) + 127) << 23);
    return x < -87.0f ? Vec{} : p * power;
}
