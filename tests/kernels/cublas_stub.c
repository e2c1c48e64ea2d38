/* A stand-in for cuBLAS on the host: the calls our binding makes, with the meaning of NVIDIA's manual.
 *
 * Matrices are column by column, element (i, j) at [i + j * ld]. Calls are written down in the log
 * that stub_log() gives, up to 1 MiB; stub_fail(s) makes the next product return status s. Where the
 * manual asks for something (a workspace set after the stream, strides that hold a column), a product
 * without it is refused.
 */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, OP_N = 0, OP_T = 1 };

typedef struct {
    void *stream, *workspace;
    size_t workspace_bytes;
    int math_mode;
} Handle;

static char log_text[1 << 20];
static size_t log_length;
static int next_status;

static void note(const char* format, ...) {
    if (sizeof log_text - log_length < 256) return;
    va_list arguments;
    va_start(arguments, format);
    log_length += vsnprintf(log_text + log_length, sizeof log_text - log_length, format, arguments);
    va_end(arguments);
}

const char* stub_log(void) { return log_text; }
void stub_fail(int status) { next_status = status; }

static float from_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return bits >> 15 ? -size : size;
}

static uint16_t to_half(float value) {
    int exponent;
    frexpf(value, &exponent);
    exponent = exponent - 1 < -14 ? -14 : exponent - 1;
    int mantissa = (int)nearbyintf(ldexpf(fabsf(value), 10 - exponent));
    if (mantissa == 2048) mantissa = 1024, ++exponent;
    const int size = mantissa < 1024 ? mantissa : (exponent + 15) * 1024 + mantissa - 1024;
    return (uint16_t)(size | (signbit(value) ? 1 << 15 : 0));
}

static float load(const void* array, int type, int64_t i) {
    union { uint32_t bits; float value; } word;
    if (type == R_32F) return ((const float*)array)[i];
    if (type == R_16F) return from_half(((const uint16_t*)array)[i]);
    word.bits = (uint32_t)((const uint16_t*)array)[i] << 16;
    return word.value;
}

static void store(void* array, int type, int64_t i, float value) {
    union { float value; uint32_t bits; } word = {value};
    if (type == R_32F) ((float*)array)[i] = value;
    else if (type == R_16F) ((uint16_t*)array)[i] = to_half(value);
    else ((uint16_t*)array)[i] = (uint16_t)((word.bits + 0x7fff + (word.bits >> 16 & 1)) >> 16);
}

int cublasCreate_v2(Handle** handle) {
    *handle = calloc(1, sizeof(Handle));
    note("create\n");
    return SUCCESS;
}

int cublasDestroy_v2(Handle* handle) {
    free(handle);
    note("destroy\n");
    return SUCCESS;
}

int cublasGetProperty(int type, int* value) {
    const int version[] = {12, 9, 1};
    *value = version[type];
    return SUCCESS;
}

int cublasSetStream_v2(Handle* handle, void* stream) {
    handle->stream = stream;
    handle->workspace = NULL;
    note("stream %lx\n", (unsigned long)stream);
    return SUCCESS;
}

int cublasSetWorkspace_v2(Handle* handle, void* workspace, size_t bytes) {
    handle->workspace = workspace;
    handle->workspace_bytes = bytes;
    note("workspace %lx %lu\n", (unsigned long)workspace, (unsigned long)bytes);
    return SUCCESS;
}

int cublasSetMathMode(Handle* handle, int mode) {
    handle->math_mode = mode;
    note("math mode %d\n", mode);
    return SUCCESS;
}

int cublasGemmEx(
    Handle* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
    int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c,
    int ldc, int compute_type, int algorithm) {
    note("gemm %d %d  %d %d %d  types %d %d %d  strides %d %d %d  compute %d algorithm %d\n", op_a,
         op_b, m, n, k, type_a, type_b, type_c, lda, ldb, ldc, compute_type, algorithm);
    if (next_status) {
        const int status = next_status;
        next_status = 0;
        return status;
    }
    if (m < 0 || n < 0 || k < 0 || lda < (op_a == OP_N ? m : k) || ldb < (op_b == OP_N ? k : n) ||
        ldc < m || op_a > OP_T || op_b > OP_T || !handle->stream || !handle->workspace)
        return INVALID_VALUE;
    if (compute_type != COMPUTE_32F || type_a != type_b || (type_c != type_a && type_c != R_32F))
        return NOT_SUPPORTED;
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < m; ++i) {
            float sum = 0;
            for (int64_t l = 0; l < k; ++l)
                sum += load(a, type_a, op_a == OP_N ? i + l * lda : l + i * lda) *
                       load(b, type_b, op_b == OP_N ? l + j * ldb : j + l * ldb);
            sum *= *(const float*)alpha;
            /* As BLAS has it: with beta 0, what c holds is not looked at. */
            if (*(const float*)beta != 0) sum += *(const float*)beta * load(c, type_c, i + j * ldc);
            store(c, type_c, i + j * ldc, sum);
        }
    }
    return SUCCESS;
}
