#include "eval/words.hpp"

#include <algorithm>
#include <array>
#include <random>

#include "files/ascii.hpp"
#include "train/random.hpp"

namespace kvzap::eval {
namespace {

constexpr std::string_view noun_list =
    "acorn airport alley almond anchor ankle antenna anthem apple apron aquarium arcade archer "
    "arrow artist attic autumn avenue axle bachelor badge bakery balcony ballad balloon bamboo "
    "banana bandage banjo banker banner barber bargain barn barrel basin basket bathtub battery "
    "beach beacon beard beaver bedroom beetle bell bench berry bicycle billboard biscuit "
    "blanket blossom boat bonfire bookcase boot border bottle boulder bouquet bowl bracelet "
    "branch bread breeze brick bride bridge broom brother brush bucket buckle buffalo builder "
    "bulb bus butcher butter butterfly button cabbage cabin cable cactus cafe cage cake "
    "calendar camel camera camp canal candle candy canoe canvas canyon captain caravan "
    "cardboard carpet carriage carrot cart castle cattle cave ceiling cellar cello chair chalk "
    "channel chapel chapter cheese cherry chess chicken chimney choir church cider cinema "
    "circle circus clarinet cliff clinic clock closet cloth cloud clown coach coast coat "
    "cobbler coffee coin collar colony comet compass concert cook copper coral corner costume "
    "cottage cotton couch counter country cousin cradle crane crayon creek cricket crow crowd "
    "crown crystal cup cupboard curtain cushion dairy dancer daughter deck deer delta dentist "
    "desert desk diamond diary dinner dolphin donkey door dragon drawer dress drum duck dune "
    "eagle earring easel echo elbow elephant elevator engine envelope evening factory falcon "
    "family farm farmer feather fence ferry festival field fiddle finger fireplace fisherman "
    "flag flame flashlight flower flute forest fork fortress fountain fox frame freezer friend "
    "frog fruit funnel furnace galaxy gallery garage garden garlic garment gate giant ginger "
    "giraffe glacier glass glove goat goose grape grass guitar hallway hammer hammock harbor "
    "harp harvest hawk hedge helmet herd hill honey hook horizon horse hospital hotel house "
    "hunter iceberg inn insect island ivory jacket jar jewel journal journey jungle kettle key "
    "kingdom kitchen kite kitten knee knight ladder lady lagoon lake lamp lantern lawn lawyer "
    "leaf leather lemon letter library lighthouse lily lion lizard lobby lobster locker lodge "
    "lumber magnet mailbox manor mansion map marble market mask meadow medal melody melon "
    "merchant mill miner mirror monkey monument moon morning mosaic moth motor mountain mouse "
    "museum mushroom musician napkin neighbor nephew nest newspaper nickel notebook oak oasis "
    "ocean officer olive onion opera orange orchard orchestra organ otter oven owl oyster "
    "package paddle painter palace pancake panther paper parade parcel park parrot passenger "
    "pasture path peach peanut pebble pelican pencil penguin pepper piano picnic picture pier "
    "pigeon pilgrim pillow pilot pine pipe pirate pitcher planet plate platform plaza plum "
    "pocket poet pond pony porch port postcard potato potter prairie princess printer puddle "
    "pumpkin puppet quarry queen quilt rabbit raccoon radio raft railway rainbow ranch raven "
    "reef ribbon rice ring river road robin rocket roof rooster rope rose ruler saddle sailor "
    "salad salmon sandal sandwich sauce saucer scarf school scientist scooter sculpture seagull "
    "season sentence shadow shark sheep shelf shell shepherd sheriff ship shirt shoe shoulder "
    "shovel sink sister sketch skirt sleigh slipper snail soap sofa soldier soup sparrow spider "
    "spoon squirrel stable stadium stage stair star statue steam stocking stone stool storm "
    "stove stranger straw stream student suitcase summit sunset surgeon swan sweater table "
    "tailor tavern teacher teapot temple tent terrace theater thistle thread throne ticket "
    "tiger timber tomato tortoise tower tractor trail train treasure tree trolley trumpet trunk "
    "tulip tunnel turkey turtle twig umbrella uncle vase vault velvet village vineyard violin "
    "visitor volcano wagon waiter wallet walnut walrus waterfall whale wheel whistle widow "
    "willow window winter wizard wolf workshop yard zebra";

constexpr std::string_view adjective_list =
    "absent active agile alert amber ample ancient angry anxious aquatic arctic atomic austere "
    "average awake aware awkward bald basic bitter blank bleak blind blond bold brave brief "
    "bright brisk broad broken bronze burly busy calm candid careful casual cautious central "
    "charming cheap cheerful chief chilly civil classic clean clear clever clumsy coarse cold "
    "colorful comfortable common complete cool cosmic costly courteous crafty creamy crisp "
    "crooked cruel cubic curious curly daily damp daring dark dear decent deep delicate dense "
    "dim direct distant double dreamy dry dull durable dusty eager early earnest eastern easy "
    "elderly electric elegant empty endless enormous equal eternal exact exotic extra faded "
    "faint fair faithful familiar famous fancy fast feeble fertile fierce final firm flat "
    "flexible fluffy foggy fond foreign formal fragile frail frank free fresh friendly frosty "
    "frozen frugal full funny furry fuzzy gallant generous gentle genuine gifted glad gleaming "
    "glossy golden graceful grand grateful grave greedy grim gritty handsome handy happy hardy "
    "harsh hasty healthy hearty heavy helpful hidden hollow honest humble humid hungry icy "
    "ideal idle immense inner innocent jolly joyful keen kind large lasting late lavish lazy "
    "lean lively local lofty lonely loose loud lovely loyal lucky lunar major mature mellow "
    "merry mighty mild minor misty modern modest moist mossy muddy musical mute mystic naive "
    "narrow native neat nervous new nimble noble noisy nordic normal northern novel obedient "
    "odd old open orderly outer oval pale patient peaceful perfect plain pleasant plump polar "
    "polite poor popular portable precise pretty prime private profound prompt proper proud "
    "pure quaint quick quiet random rapid rare raw ready regal regular remote rich rigid ripe "
    "robust rocky rosy rough round royal rugged rural rustic rusty sacred salty scarce scenic "
    "secret secure sensible serene serious shady shallow sharp shiny short shy silent silky "
    "silver simple sincere sleepy slender slim slow small smart smooth snowy sober soft solar "
    "solemn solid somber sour southern spare sparkling spicy splendid square steady steep stern "
    "sticky stiff still stormy strange strict strong stubborn sturdy subtle sudden sunny superb "
    "supreme sweet swift tall tame tender thick thin thirsty thorough tidy tight tiny tired "
    "tranquil tropical tough upright urban useful usual vacant vague valid vast vital vivid "
    "warm wary weary western wet wide wild windy wise witty wooden worthy young zealous";

constexpr std::string_view verb_list =
    "accept admire advise agree allow announce appear argue arrange arrive ask assist attend "
    "avoid awaken bake balance bathe become begin behave believe belong blame bless blink boil "
    "borrow bounce breathe bring build burn bury buy carry carve catch celebrate change chase "
    "choose clap climb collect combine compare complain confess consider continue copy count "
    "cover crawl create cross cry cure dance decide decorate deliver deny describe deserve "
    "destroy develop dig disagree discover divide draw drift drink drive earn eat encourage "
    "enjoy enter escape examine excite excuse exist expand expect explain explore fasten feed "
    "fetch fill find fix float fly fold follow forget forgive gather give glow grow guess guide "
    "hang happen heal hear help hide hold hope hug hum hurry imagine improve include increase "
    "inform invent invite jump juggle knit knock know laugh launch learn leave lend lift listen "
    "load mend mix move notice obey observe offer order paint perform plant play pour practice "
    "pray predict prefer prepare present pretend prevent produce promise protect prove pull "
    "punish push reach read realize receive recognize record refuse rejoice relax remain "
    "remember remind remove repair repeat replace reply rescue rest return rinse roll rub sail "
    "save scatter scratch scrub search seem sell send settle sew shake share shelter shiver "
    "shout sing sit sleep slide smile sneeze solve sort speak spill spread squeeze stand stare "
    "start stay steer step stir stretch stroll suggest support suppose surprise swallow sweep "
    "swim switch talk taste teach tell thank think throw tie touch trade travel treat tremble "
    "trust tumble understand unite unlock unpack vanish visit wait wake walk wander warn wash "
    "waste weave welcome whisper win wipe wish wonder work wrap wrestle write yawn yield";

// Sentences; A, N and V are placeholders of an adjective, a noun and a verb.
constexpr std::array prose_patterns = {
    "Nobody in the N could remember when the A N had been built.",
    "The A N stood beside the N until the N was A again.",
    "In the end the N seemed A, although the N next to it was rather A.",
    "She wanted to V before the N, but the A N would not let her.",
    "It is hard to V when every N looks as A as the last one.",
    "They had learned to V from an old N, and they never forgot it.",
    "There was a N behind the N, and behind that there was another N.",
    "People who V and V all day tend to notice a A N sooner than others.",
    "If the N is A, then the N must have been A as well.",
    "What matters is not the N but the way in which it was made.",
    "He put the N on the table, looked at the N, and began to V.",
    "Some said that the A N belonged to the N; most did not care.",
    "After the N came the N, and with it a A wish to V.",
    "Why should a A N need a N at all?",
    "One may V for years without seeing a N that is truly A.",
    "The road to the N leads past a A N and a A N.",
    "We used to V there, until the N became too A for us.",
    "Between the N and the N there is room for a A N.",
    "A good N does not have to be A, only A enough.",
    "When you V with care, the N turns A by itself.",
    "My N thought that it was better to V than to V.",
    "Every N has its N, as the A N used to say.",
    "That N was the first thing that I would V if I could.",
    "Much later they would V again, with a N in each hand.",
    "The N, A and A, was waiting for someone to V.",
    "It took a A N and three attempts to V properly.",
    "Neither the N nor the A N had changed in the meantime.",
    "You could hear the N from far away, A and A at once.",
    "To V is one thing; to V near a A N is quite another.",
    "So the N was left where it was, under the A N.",
};

/// Returns whether the word takes the article "an".
bool begins_with_a_vowel(std::string_view word) {
  return word == "honest" || word == "heir" || word == "hour" ||
         (std::string_view("aeio").find(word.front()) != std::string_view::npos) ||
         (word.front() == 'u' && word.substr(0, 3) != "use" && word.substr(0, 3) != "usu" &&
          word.substr(0, 3) != "uni");
}

void append_sentence(std::string& text, std::string_view pattern, std::mt19937_64& random) {
  const auto pick = [&](const std::vector<std::string_view>& words) {
    return words[train::below(random, words.size())];
  };
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const auto is_letter = [&](std::size_t at) {
      return at < pattern.size() && files::is_letter(pattern[at]);
    };
    const char c = pattern[i];
    const bool alone = !is_letter(i + 1) && (i == 0 || !is_letter(i - 1));
    // An A at the start of a sentence is an article.
    if (!alone || i == 0 || (c != 'A' && c != 'N' && c != 'V')) {
      text += c;
      continue;
    }
    const std::string_view word =
        pick(c == 'A' ? adjectives() : (c == 'N' ? common_nouns() : verbs()));
    const bool article = text.size() >= 3 && text.compare(text.size() - 3, 3, " a ") == 0;
    if (article && begins_with_a_vowel(word)) text.insert(text.size() - 1, "n");
    text += word;
  }
}

}  // namespace

std::vector<std::string_view> words_of(std::string_view list) {
  std::vector<std::string_view> words;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(' '), list.size());
    words.push_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return words;
}

const std::vector<std::string_view>& common_nouns() {
  static const auto words = words_of(noun_list);
  return words;
}

const std::vector<std::string_view>& adjectives() {
  static const auto words = words_of(adjective_list);
  return words;
}

const std::vector<std::string_view>& verbs() {
  static const auto words = words_of(verb_list);
  return words;
}

std::string made_up_prose(std::size_t words) {
  std::mt19937_64 random(1);
  std::string text;
  std::size_t made = 0;
  while (made < words) {
    if (!text.empty()) text += ' ';
    const std::size_t begin = text.size();
    append_sentence(text, prose_patterns[train::below(random, prose_patterns.size())], random);
    made += 1 + std::count(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), ' ');
  }
  return text;
}

}  // namespace kvzap::eval
