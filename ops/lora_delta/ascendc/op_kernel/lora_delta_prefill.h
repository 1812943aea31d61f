// lora_delta for many tokens, in three steps with a synchronization of all cores between them:
//   shrink (cube cores): x A^T, by slices of K, so in as many partial sums, float32;
//   reduce (vector cores): the sum of them times scale, rounded to T;
//   expand (cube cores): y0 + low B^T, by slices of N.
#pragma once

#include "ascendc_common/prefill_vector.h"
#include "lora_delta_prefill_cube.h"

namespace mindlora {

template <typename T>
__aicore__ inline void LoraDeltaPrefill(GM_ADDR y0, GM_ADDR x, GM_ADDR a, GM_ADDR b, GM_ADDR scale, GM_ADDR y,
    GM_ADDR workspace, const LoraDeltaTiling& sizes)
{
    if constexpr (sizeof(T) == sizeof(half)) {  // the plan sends no other types here
        AscendC::TPipe pipe;
        const PrefillExchange<T> exchange(sizes.tokens, sizes.rank, sizes.prefill.shrinkSlices, workspace);
        if ASCEND_IS_AIC {
            LoraDeltaPrefillCube<T> cube(pipe, sizes, exchange);
            cube.Shrink(x, a);
            AscendC::SyncAll<false>();
            // The vector cores reduce.
            AscendC::SyncAll<false>();
            cube.Expand(y0, b, y);
        }
        if ASCEND_IS_AIV {
            AscendC::GlobalTensor<float> scaleGm;
            scaleGm.SetGlobalBuffer((__gm__ float*)scale, 1);
            PrefillVector<T> vector(pipe, sizes.prefill, exchange);
            vector.WriteIdentityOnce();
            AscendC::SyncAll<false>();
            vector.Reduce(vector.Mine(exchange.size, kFractalSide), scaleGm.GetValue(0));
            AscendC::SyncAll<false>();
        }
    }
}

}  // namespace mindlora
