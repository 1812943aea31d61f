// What a kernel includes: a functional model, on a CPU, of the part of the Ascend C API that this project's kernels
// use. It is not CANN; see README.md.
#pragma once

#include "model/arithmetic.h"
#include "model/cast.h"
#include "model/copy.h"
#include "model/cross_core.h"
#include "model/cube.h"
#include "model/fill.h"
#include "model/flags.h"
#include "model/gather.h"
#include "model/pipe_and_queues.h"
#include "model/reduce.h"
#include "model/tensor.h"
