/* mlfab_gpu.cu - mlfab on a CUDA device, in one file to compile. mlfab_gpu.h is the manual.
 *
 *    nvcc -O3 -std=c++17 -arch=sm_80 -c gpu/mlfab_gpu.cu        and link with -lcudart
 *
 * SPDX-License-Identifier: MIT
 */
#include "src/kernels.cu"

#include "src/device.cu"
