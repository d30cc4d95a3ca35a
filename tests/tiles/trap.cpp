// Carries out AMX's instructions where the processor has none, so that those which the library is
// made of run everywhere: a handler of SIGILL decodes the few that src/attention/host uses. Unlike
// the emulated level this shows that their operands and the shape of the registers are right.
#include <gtest/gtest.h>
#include <immintrin.h>
#include <ucontext.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <kvzap/core/types.hpp>

#include "base/simd.hpp"

namespace {

using kvzap::base::SimdLevel;

struct Registers {
  alignas(64) float tiles[8][256];
  bool has_shape;
};
thread_local Registers registers;

std::int64_t trapped = 0;         // instructions
std::int64_t trapped_halves = 0;  // products of f16 among them
const char* wrong = nullptr;

using Context = decltype(ucontext_t::uc_mcontext.gregs);
using Byte = std::uint8_t;

std::int64_t general_register(const Context& context, int number) {
  constexpr int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context[places[number]];
}

/// Of three-byte VEX: what the instruction is made of.
struct Instruction {
  int opcode, prefix;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  int reg, rm, third;  // registers
  bool in_memory;
  std::int64_t address, stride;
  std::int64_t bytes;
};

std::int32_t displacement_at(const Byte* at) {
  std::int32_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

bool decode(const Byte* code, const Context& context, Instruction& x) {
  // Map 0F38, W and L 0; the bits for registers above 7 are stored inverted.
  if (code[0] != 0xc4 || (code[1] & 0x9f) != 0x82 || (code[2] & 0x84) != 0) return false;
  const int index_8 = (code[1] & 0x40) ? 0 : 8;
  const int base_8 = (code[1] & 0x20) ? 0 : 8;
  x.third = ~(code[2] >> 3) & 15;
  x.prefix = code[2] & 3;
  x.opcode = code[3];
  const int mode = code[4] >> 6;
  x.reg = code[4] >> 3 & 7;
  x.rm = code[4] & 7;
  const Byte* next = code + 5;
  x.in_memory = mode != 3;
  x.address = x.stride = 0;
  bool from_next = false;
  if (x.in_memory) {
    int base = x.rm;
    if (x.rm == 4) {
      const int scaled = *next++;
      base = scaled & 7;
      const int index = (scaled >> 3 & 7) + index_8;
      if (base == 5 && mode == 0) return false;
      if (index != 4) x.stride = general_register(context, index) * (1 << (scaled >> 6));
    }
    from_next = mode == 0 && x.rm == 5;
    if (!from_next) x.address = general_register(context, base + base_8);
    if (mode == 1) x.address += static_cast<std::int8_t>(*next++);
    if (mode == 2 || from_next) {
      x.address += displacement_at(next);
      next += 4;
    }
  }
  x.bytes = next - code;
  if (from_next) x.address += reinterpret_cast<std::int64_t>(next);
  return true;
}

/// The one shape that the library uses: eight tiles of 16 rows of 64 bytes.
bool is_shape(const Byte* source) {
  Byte expected[64] = {1};
  for (int i = 0; i < 8; ++i) {
    expected[16 + 2 * i] = 64;
    expected[48 + i] = 16;
  }
  return std::memcmp(source, expected, sizeof(expected)) == 0;
}

KVZAP_TARGET_AVX512_BF16 void multiply(float* sums, const float* a, const float* b) {
  for (int row = 0; row < 16; ++row) {
    __m512 sum = _mm512_load_ps(sums + row * 16);
    for (int pair = 0; pair < 16; ++pair) {
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(a[row * 16 + pair]),
                             (__m512bh)_mm512_load_ps(b + pair * 16));
    }
    _mm512_store_ps(sums + row * 16, sum);
  }
}

void multiply_halves(float* sums, const float* a, const float* b) {
  kvzap::half packed[2][512];
  float rows[512], columns[512];
  std::memcpy(packed[0], a, sizeof(packed[0]));
  std::memcpy(packed[1], b, sizeof(packed[1]));
  for (int i = 0; i < 512; ++i) {
    rows[i] = static_cast<float>(packed[0][i]);
    columns[i] = static_cast<float>(packed[1][i]);
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 32; ++k) {
      for (int column = 0; column < 16; ++column) {
        sums[row * 16 + column] += rows[row * 32 + k] * columns[k / 2 * 32 + column * 2 + k % 2];
      }
    }
  }
}

/// False if it is none of the instructions.
bool carry_out(const Instruction& x) {
  auto& tiles = registers.tiles;
  char* const memory = reinterpret_cast<char*>(x.address);
  if (x.opcode == 0x49 && x.prefix == 0) {  // ldtilecfg, tilerelease
    if (x.in_memory ? x.reg != 0 : x.reg != 0 || x.rm != 0) return false;
    if (registers.has_shape == x.in_memory) wrong = "shaped twice, or released without a shape";
    if (x.in_memory && !is_shape(reinterpret_cast<Byte*>(x.address + x.stride))) wrong = "shape";
    registers.has_shape = x.in_memory;
    return true;
  }
  if (!registers.has_shape) wrong = "a tile is used before it has a shape";
  if (x.opcode == 0x49 && x.prefix == 3 && !x.in_memory) {  // tilezero
    std::memset(tiles[x.reg], 0, sizeof(tiles[0]));
  } else if (x.opcode == 0x4b && x.in_memory && x.prefix != 0) {  // tileloadd(t1), tilestored
    for (int row = 0; row < 16; ++row) {
      char* const line = reinterpret_cast<char*>(tiles[x.reg] + row * 16);
      if (x.prefix == 2) {
        std::memcpy(memory + row * x.stride, line, 64);
      } else {
        std::memcpy(line, memory + row * x.stride, 64);
      }
    }
  } else if (x.opcode == 0x5c && x.prefix >= 2 && !x.in_memory) {  // tdpbf16ps, tdpfp16ps
    if (x.reg == x.rm || x.reg == x.third || x.rm == x.third || x.third > 7) return false;
    if (x.prefix == 3) ++trapped_halves;
    (x.prefix == 2 ? multiply : multiply_halves)(tiles[x.reg], tiles[x.rm], tiles[x.third]);
  } else {
    return false;
  }
  return true;
}

void trap(int, siginfo_t*, void* context_of_signal) {
  Context& context = static_cast<ucontext_t*>(context_of_signal)->uc_mcontext.gregs;
  Instruction instruction{};
  if (decode(reinterpret_cast<const Byte*>(context[REG_RIP]), context, instruction) &&
      carry_out(instruction)) {
    ++trapped;
    context[REG_RIP] += instruction.bytes;
  } else {
    signal(SIGILL, SIG_DFL);  // and the same again
  }
}

class Trap : public ::testing::Environment {
 public:
  void SetUp() override {
    struct sigaction action = {};
    action.sa_sigaction = trap;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
  }
  void TearDown() override {
    signal(SIGILL, SIG_DFL);
    EXPECT_EQ(wrong, nullptr) << wrong;
    std::printf("%lld instructions of AMX were carried out by the handler\n",
                static_cast<long long>(trapped));
  }
};
[[maybe_unused]] const auto* const environment = ::testing::AddGlobalTestEnvironment(new Trap);

// After the tests of attention, which come first in this executable.
TEST(ZTiles, WereUsedAndReleased) {
  if (!KVZAP_X86_TILES) GTEST_SKIP() << "built without AMX";
  if (!processor_has(SimdLevel::avx512_bf16)) GTEST_SKIP() << "the handler needs AVX512-BF16";
  EXPECT_GE(kvzap::base::simd_level_of_processor(), SimdLevel::amx_bf16);
  EXPECT_FALSE(registers.has_shape);
  // None on a processor that has AMX.
  EXPECT_TRUE(trapped == 0 || trapped > 10000) << trapped;
  EXPECT_TRUE(trapped == 0 || trapped_halves > 1000) << trapped_halves;
}

}  // namespace
