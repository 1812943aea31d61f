// Sums over cores, through global memory, in an order that does not depend on which core is first.
#pragma once

#include "kernel_operator.h"

namespace mindlora {

// rows[0] += rows[1] + ... of `count` rows of `width` floats, width a multiple of 8: halves are added until one row is
// left. PIPE_V.
__aicore__ inline void AddRowsUp(const AscendC::LocalTensor<float>& rows, uint32_t count, uint32_t width)
{
    while (count > 1) {
        const uint32_t added = count / 2;
        AscendC::Add(rows, rows, rows[(count - added) * width], static_cast<int32_t>(added * width));
        count -= added;
    }
}

}  // namespace mindlora
